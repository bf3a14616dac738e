"""`specserve loadgen peers`: what a measurement counts, and how ratios are made fairly."""

from __future__ import annotations

import msgspec
import pytest

from specserve_loadgen.client import limit_of
from specserve_loadgen.peers_measure import (
    PREFILL_TOKENS,
    Cell,
    Measured,
    Supply,
    Turn,
    make_cells,
    measured,
    prefill_prompts,
    split_workloads,
)
from specserve_loadgen.peers_process import (
    describe_machine,
)
from specserve_loadgen.peers_report import (
    PeerReport,
    PeerSettings,
    TurnNotes,
    complete,
    render,
)
from specserve_loadgen.peers_servers import Server
from specserve_loadgen.prompts import Message, Prompt
from specserve_loadgen.records import Chunk, Failure, RequestRecord
from specserve_loadgen.settings import Settings
from tests import http_server
from tests.peer_words import a_server
from tests.scripted import says

CHAT_1 = Cell(workload="chat", concurrency=1)
CHAT_2 = Cell(workload="chat", concurrency=2)
PREFILL = Cell(workload="prefill", concurrency=1)


# ---- what is measured --------------------------------------------------------------------------


def a_record(
    idx: int = 0,
    *,
    sent: float = 0.0,
    first: float = 0.5,
    gaps: tuple[float, ...] = (0.1, 0.1),
    failure: Failure | None = None,
    num_prompt_tokens: int = 10,
) -> RequestRecord:
    """One token at `first` seconds after `sent`, and one more after each gap."""
    chunks, now = [Chunk(sent + first, 1)], sent + first
    for gap in gaps:
        now += gap
        chunks.append(Chunk(now, 1))
    return RequestRecord(
        request_idx=idx,
        prompt_id=str(idx),
        category="chat",
        scheduled=None,
        sent=sent,
        ended=now,
        first_text=sent + first,
        chunks=tuple(chunks),
        counted_by="token_ids",
        num_output_tokens=len(chunks),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=None,
        finish_reason="length",
        speculative=None,
        specserve=None,
        failure=failure,
    )


def test_output_speed_is_all_tokens_over_the_time_from_first_send_to_last_end() -> None:
    records = [a_record(0, sent=0.0), a_record(1, sent=0.3)]  # 3 tokens each, ends at .7 and 1.0
    one = measured(CHAT_1, "a", 0, records)
    assert one.tokens_per_second == pytest.approx(6 / 1.0)
    assert one.ttft_p50 == pytest.approx(0.5)
    assert one.itl_p50 == pytest.approx(0.1)
    assert (one.num_requests, one.num_failed, one.num_output_tokens) == (2, 0, 6)


def test_output_speed_of_several_users_is_counted_while_all_are_busy() -> None:
    records = [a_record(0, sent=0.0), a_record(1, sent=0.3), a_record(2, sent=0.7)]
    # Up to the last one sent: three of the first (.5, .6, .7); the second one's come later.
    assert measured(CHAT_2, "a", 0, records).tokens_per_second == pytest.approx(3 / 0.7)


def test_prompt_speed_is_the_median_of_prompt_tokens_over_time() -> None:
    records = [
        a_record(idx, sent=10.0 * idx, first=seconds, gaps=(), num_prompt_tokens=500)
        for idx, seconds in enumerate((0.5, 1.0, 5.0))
    ]
    assert measured(PREFILL, "a", 0, records).tokens_per_second == pytest.approx(500)


def test_failed_requests_are_counted_and_in_no_speed() -> None:
    broken = a_record(1, sent=0.0, gaps=(100.0,), failure=Failure(kind="timeout", message="late"))
    one = measured(CHAT_1, "a", 0, [a_record(0), broken])
    assert one.tokens_per_second == pytest.approx(3 / 0.7)
    assert (one.num_failed, one.failure) == (1, "timeout: late")
    assert measured(CHAT_1, "a", 0, [broken]).tokens_per_second == 0


def test_prompts_of_a_turn_are_new_until_the_file_is_used_up() -> None:
    prompts = [Prompt(prompt_id=str(i), category="chat", messages=()) for i in range(5)]
    supply = Supply(prompts)
    taken = [supply.take(3), supply.take(3), supply.take(3)]
    assert [[p.prompt_id for p in some] for some, _ in taken] == [
        ["0", "1", "2"],
        ["3", "4", "0"],
        ["1", "2", "3"],
    ]
    assert [repeated for _, repeated in taken] == [0, 1, 3]


async def test_a_cell_sends_three_requests_per_user_of_varied_length_each_salted() -> None:
    async with http_server.a_server(says("one two three four", then=None)) as server:
        prompts = [
            Prompt(prompt_id="only", category="chat", messages=(Message("user", "Say it."),))
        ]
        turn = Turn("ours", {"chat": prompts}, round_idx=0, max_tokens=8)
        one = await turn.measure(f"http://127.0.0.1:{server.port}", CHAT_2)
    assert (one.num_requests, one.num_failed, one.num_repeated_prompts) == (6, 0, 5)
    limits = Settings(url="", max_tokens=8, shortest=4)
    assert one.num_output_tokens == sum(limit_of(limits, idx) for idx in range(6))
    assert one.num_cached_tokens == 0  # the prompt came six times, and was read six times


def test_copying_is_measured_at_the_lowest_and_the_highest_load() -> None:
    labels = [cell.label for cell in make_cells((8, 1, 4))]
    assert labels == ["prefill 512", "chat c1", "chat c4", "chat c8", "edit c1", "edit c8"]


def test_prefill_texts_have_as_many_words_as_tokens_are_wanted_and_differ_by_round() -> None:
    first, again, other = (prefill_prompts(3, seed) for seed in (1, 1, 2))
    texts = [prompt.messages[0].content for prompt in first]
    assert all(len(text.split()) == PREFILL_TOKENS for text in texts)
    assert len(set(texts)) == 3
    assert first == again
    assert first != other


def test_a_file_with_categories_of_its_own_serves_every_workload() -> None:
    prompts = [Prompt(prompt_id="0", category="news", messages=(Message("user", "Hi"),))]
    assert split_workloads(prompts) == {"chat": prompts, "edit": prompts}


# ---- ratios ------------------------------------------------------------------------------------


def a_report(
    servers: list[Server], rates: dict[str, list[float]], cell: Cell = CHAT_1
) -> PeerReport:
    """rates: tokens/s of each round, by server"""
    return PeerReport(
        started_at=0.0,
        environment=describe_machine(),
        settings=PeerSettings(
            rounds=3,
            concurrency=(1,),
            max_tokens=8,
            peers=(),
            only=(),
            prompts_file=None,
            serve=("specserve", "serve"),
            auto=(),
        ),
        servers=tuple(servers),
        left_out={},
        turns=(),
        measured=tuple(
            Measured(
                cell=cell,
                server=name,
                round_idx=idx,
                tokens_per_second=rate,
                ttft_p50=0.1,
                itl_p50=0.01,
                itl_p99=0.02,
                num_requests=1,
                num_failed=0,
                num_output_tokens=8,
                num_prompt_tokens=8,
                num_cached_tokens=None,
                num_repeated_prompts=0,
            )
            for name, values in rates.items()
            for idx, rate in enumerate(values)
        ),
    )


def ratios_of(report: PeerReport) -> dict[tuple[str, str], tuple[str, float]]:
    return {
        (ratio.ours, ratio.claim): (ratio.other, ratio.ratio) for ratio in complete(report).ratios
    }


def test_rounds_are_paired_so_that_a_slow_minute_slows_both_sides() -> None:
    servers = [a_server("ours"), a_server("theirs", peer="llamacpp")]
    report = a_report(servers, {"ours": [100, 50, 300], "theirs": [50, 25, 100]})
    assert ratios_of(report)["ours", "best int8 peer"] == ("theirs", 2.0)
    (ratio, _) = complete(report).ratios
    assert ratio.per_round == (2.0, 2.0, 3.0)
    assert (ratio.ours_rate, ratio.other_rate) == (100, 50)


def test_the_best_peer_is_chosen_by_its_median_and_per_class() -> None:
    servers = [
        a_server("ours"),
        a_server("lucky once", peer="llamacpp"),
        a_server("steady", peer="openvino"),
        a_server("other class", peer="vllm", precision="bf16"),
        a_server("guesses", peer="llamacpp", speculation="on"),
    ]
    report = a_report(
        servers,
        {
            "ours": [60] * 3,
            "lucky once": [10, 10, 90],
            "steady": [20] * 3,
            "other class": [30] * 3,
            "guesses": [600] * 3,
        },
    )
    assert ratios_of(report) == {
        ("ours", "best int8 peer"): ("steady", 3.0),
        ("ours", "best peer of any precision"): ("other class", 2.0),
    }


def test_ours_with_speculation_meets_peers_with_theirs_and_itself_without() -> None:
    servers = [
        a_server("ours"),
        a_server("ours auto", speculation="on"),
        a_server("plain", peer="llamacpp"),
        a_server("guesses", peer="llamacpp", speculation="on"),
    ]
    rates = {"ours": [50.0], "ours auto": [100.0], "plain": [40.0], "guesses": [80.0]}
    found = ratios_of(a_report(servers, rates))
    assert found["ours auto", "ours without speculation"] == ("ours", 2.0)
    assert found["ours auto", "best int8 peer, its speculation on or off"] == ("guesses", 1.25)
    assert found["ours", "best int8 peer"] == ("plain", 1.25)


def test_a_round_with_failures_gives_no_ratio() -> None:
    report = a_report(
        [a_server("ours"), a_server("theirs", peer="llamacpp")],
        {"ours": [100.0, 100.0], "theirs": [50.0, 10.0]},
    )
    spoiled = [
        msgspec.structs.replace(one, num_failed=1)
        if (one.server, one.round_idx) == ("theirs", 1)
        else one
        for one in report.measured
    ]
    report = msgspec.structs.replace(report, measured=tuple(spoiled))
    assert ratios_of(report)["ours", "best int8 peer"] == ("theirs", 2.0)
    assert "1 of 1 failed" in render(complete(report))


def test_what_disturbed_a_run_is_said() -> None:
    report = a_report([a_server("ours")], {"ours": [1.0]})
    busy = TurnNotes(server="ours", round_idx=0, busy_cores_before=1.5)
    text = render(msgspec.structs.replace(report, turns=(busy,)))
    assert "1.5 cores busy" in text
