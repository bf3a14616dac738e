"""`study ab`, `study lossless` and `study capacity`: known servers, known answers."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from specserve_loadgen.intervals import Interval
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.records import Chunk, Output, RequestRecord
from specserve_loadgen.reports.command import main as report_main
from specserve_loadgen.reports.files import read_report
from specserve_loadgen.settings import Slo
from specserve_loadgen.studies.ab import AbStudy, measures_of
from specserve_loadgen.studies.arms import OFF, Arm, parse_arms
from specserve_loadgen.studies.capacity import CapacityStudy, Level, Plan, bounds_of, next_rate
from specserve_loadgen.studies.cells import BlockRun, Cell, Target
from specserve_loadgen.studies.difference import compare
from specserve_loadgen.studies.lossless import LosslessStudy, p_value_of_one_law, run_lossless
from specserve_loadgen.studies.lossless import Plan as LosslessPlan
from specserve_loadgen.study import main
from specserve_loadgen.wire import SpecserveMetrics
from tests.http_server import a_server
from tests.loadgen_server import serving
from tests.scripted import says
from tests.study_server import NUM_TOKENS, Asked, StudyServer, said
from tests.test_peers_numbers import a_record


async def studied(server: StudyServer, tmp_path: Path, *arguments: str) -> tuple[int, object]:
    """Exit code and the study that was written."""
    file = tmp_path / "study.json"
    async with serving(server.app()) as url:
        name, *rest = arguments
        options = [name, "--url", url, *rest, "--json", str(file)]
        code = await asyncio.to_thread(main, options)
    assert report_main([str(file), "--html", str(tmp_path / "page.html")]) == 0
    return code, read_report(file)


# ---- ab ----------------------------------------------------------------------------------------


def a_run(arm: Arm, block_idx: int, ttft: float, e2e: float, steps: int) -> BlockRun:
    known = a_record()
    record = msgspec.structs.replace(
        known,
        sent=0.0,
        first_text=ttft,
        ended=e2e,
        chunks=(Chunk(ttft, 1), Chunk(e2e, 9)),
        num_output_tokens=10,
        specserve=SpecserveMetrics(steps=steps),
    )
    return BlockRun(
        arm=arm,
        cell=Cell(0.0, 1),
        block_idx=block_idx,
        model="m",
        server_version=None,
        seconds=e2e,
        phases={},
        records=(record,),
        interrupted=False,
    )


def test_each_measure_is_the_geometric_mean_of_b_over_a_in_pairs() -> None:
    """Minutes differ tenfold, and B is always twice as fast and its first token three times."""
    rng = random.Random(1)
    pairs = []
    for idx in range(12):
        slow = 10 ** rng.random()
        wobble = 1.0 + rng.uniform(-0.02, 0.02)
        a = a_run(OFF, idx, 0.3 * slow, 2.0 * slow, 10)
        b = a_run(Arm("b", "b", 1), idx, 0.1 * slow * wobble, 1.0 * slow * wobble, 5)
        pairs.append((a, b))
    found = {one.name: one.b_over_a for one in measures_of(pairs)}
    for name, truth in (
        ("output tokens/s", 2.0),
        ("TTFT", 1 / 3),
        ("time per token after the first", 0.9 / 1.7),
        ("E2E", 0.5),
        ("tokens per target step", 2.0),
    ):
        interval = found[name]
        assert interval is not None
        assert interval.low is not None
        assert interval.high is not None
        assert interval.low <= truth <= interval.high or interval.estimate == pytest.approx(truth)
        assert interval.high / interval.low < 1.05  # though A's own times vary tenfold


async def test_sides_take_turns_with_the_same_prompts_and_seeds_and_equal_texts_are_seen(
    tmp_path: Path,
) -> None:
    server = StudyServer(lambda one, at: 0.7)
    options = ("ab", "--a", "off", "--b", "flat:3", "--per-category", "1")
    code, study = await studied(server, tmp_path, *options)
    assert code == 0
    assert isinstance(study, AbStudy)
    drafters = [body["speculation"]["drafter"] for body in server.bodies[4:]]  # type: ignore[index]
    assert drafters[:6] == ["none", "flat", "flat", "none", "none", "flat"]
    seeds = [body["seed"] for body in server.bodies[4:]]
    assert seeds[0::2] == seeds[1::2]
    assert study.texts.num_different == 0
    assert study.texts.num_compared == NUM_TOKENS * study.num_requests
    assert study.b.mean_acceptance_length is not None


async def test_a_setting_that_changes_the_text_under_replay_fails_the_study(tmp_path: Path) -> None:
    def changes(one: Asked) -> list[int]:
        ids = said(one)
        return ids if one.drafter == "none" else [*ids[:7], ids[7] + 1, *ids[8:]]

    options = ("ab", "--b", "flat:3", "--per-category", "1")
    code, study = await studied(StudyServer(says=changes), tmp_path, *options)
    assert code == 1
    assert isinstance(study, AbStudy)
    assert study.texts.num_different == study.texts.num_different_requests == study.num_requests
    assert study.texts.first is not None
    assert study.texts.first.token_idx == 7
    assert (
        "replies differ (exact replay promises equal ones)" in (tmp_path / "page.html").read_text()
    )


def test_differences_count_places_and_all_behind_the_shorter_end() -> None:
    def record(ids: tuple[int, ...] | None, text: str) -> RequestRecord:
        return msgspec.structs.replace(a_record(), output=Output(text, ids))

    found = compare([record((1, 2, 3, 4), "")], [record((1, 9, 3), "")])
    assert (found.by, found.num_compared, found.num_different) == ("tokens", 4, 2)
    found = compare([record(None, "abc")], [record((1,), "abd")])
    assert (found.by, found.num_compared, found.num_different) == ("characters", 3, 1)


# ---- lossless ----------------------------------------------------------------------------------


def by_law(one: Asked) -> list[int]:
    """Twelve words, the likelier the hotter; `typical` and nobody else favours the first."""
    rng = random.Random(f"{one.prompt}/{one.seed}")
    sharpness = 0.5 / max(one.temperature, 0.1) + (0.25 if one.rule == "typical" else 0.0)
    weights = [math.exp(-sharpness * word) for word in range(12)]
    return rng.choices(range(12), weights, k=NUM_TOKENS)


async def test_a_lossy_rule_is_found_out_and_a_lossless_one_is_not_accused(tmp_path: Path) -> None:
    server = StudyServer(lambda one, at: 0.5, says=by_law)
    options = ("lossless", "--arms", "flat:3,flat:3@block,flat:3@typical", "--temperatures", "0.7")
    more = ("--per-category", "1", "--samples", "120", "--law-prompts", "3")
    code, study = await studied(server, tmp_path, *options, *more)
    assert code == 1
    assert isinstance(study, LosslessStudy)
    assert [one.arm for one in study.identities] == ["flat:3"]
    assert study.num_different == 0
    laws = {law.arm: law for law in study.laws}
    assert not laws["flat:3@block"].refuted
    assert laws["flat:3@block"].p_value > 0.05
    assert laws["flat:3@typical"].refuted
    assert all(law.could_tell for law in laws.values())
    assert "another law: flat:3@typical" in (tmp_path / "page.html").read_text()


def test_the_p_value_is_as_often_below_5_percent_as_it_says_and_sees_a_real_difference() -> None:
    rng = np.random.default_rng(4)

    def replies(weights: list[float], count: int = 60) -> list[tuple[int, ...]]:
        return [tuple(int(w) for w in rng.choice(4, 3, p=weights)) for _ in range(count)]

    even, uneven = [0.25] * 4, [0.4, 0.3, 0.2, 0.1]
    same = [p_value_of_one_law([replies(even)], [replies(even)]) for _ in range(60)]
    assert sum(p < 0.05 for p in same) <= 8  # 3 are expected; more than 8: 1 in 200
    assert 0.35 < float(np.mean(same)) < 0.65
    assert all(p_value_of_one_law([replies(even)], [replies(uneven)]) < 0.01 for _ in range(5))


async def test_the_real_server_is_lossless_token_for_token_under_every_drafter() -> None:
    async with a_server(says("one two three four five six", then=None)) as server:
        plan = LosslessPlan(
            target=Target(url=f"http://127.0.0.1:{server.port}", max_tokens=24),
            arms=parse_arms("--arms", "oracle:3,anti:2,auto"),
            temperatures=(0.0, 1.0),
        )
        study = await run_lossless(plan, load_prompts(None, ["chat"])[:4], lambda line: None)
    assert study.holds
    assert study.num_different == 0
    assert [(one.arm, one.temperature) for one in study.identities] == [
        ("oracle:3", 0.0), ("anti:2", 0.0), ("auto", 0.0),
        ("oracle:3", 1.0), ("anti:2", 1.0), ("auto", 1.0),
    ]  # fmt: skip
    assert all(one.num_spec_steps for one in study.identities if one.arm != "auto")
    assert all(one.difference.num_compared == 4 * 24 for one in study.identities)


# ---- capacity ----------------------------------------------------------------------------------


def a_level(rate: float, *, holds: bool) -> Level:
    return Level(
        rate=rate,
        good=Interval(float(holds), None, None, 10),
        good_per_second=rate,
        output_tokens_per_second=rate,
        ttft_p50=None,
        ttft_p99=None,
        broken={},
        holds=holds,
        late_seconds=0.0,
    )


@pytest.mark.parametrize("truth", [0.3, 1.0, 7.7, 130.0, 5000.0])
def test_the_search_ends_between_a_rate_that_holds_and_one_that_does_not(truth: float) -> None:
    plan = Plan(target=Target(url=""), arm=OFF, slo=Slo(ttft=1.0), most_rate=1000.0)
    levels: list[Level] = []
    while (rate := next_rate(plan, levels)) is not None:
        levels.append(a_level(rate, holds=rate <= truth))
        assert len(levels) < 25
    low, high = bounds_of(levels)
    assert low is not None
    if truth > plan.most_rate:
        assert (low, high) == (1000.0, None)
        return
    assert high is not None
    assert low <= truth < high
    assert high / low <= plan.precision


def test_a_rate_that_held_by_chance_above_one_that_failed_is_not_believed() -> None:
    levels = [a_level(1, holds=True), a_level(2, holds=False), a_level(4, holds=True)]
    assert bounds_of(levels) == (1, 2)


async def test_a_server_that_keeps_no_limit_and_one_that_keeps_all(tmp_path: Path) -> None:
    options = ("capacity", "--num-requests", "8", "--first-rate", "400", "--most-rate", "800")
    code, study = await studied(StudyServer(), tmp_path, *options, "--slo", "e2e:0.0001")
    assert code == 1
    assert isinstance(study, CapacityStudy)
    assert study.capacity is None
    assert all(level.broken == {"e2e": 8} for level in study.levels)
    assert "Not even 6.25 requests per second hold." in (tmp_path / "page.html").read_text()
    code, study = await studied(StudyServer(), tmp_path, *options, "--slo", "e2e:60000")
    assert code == 0
    assert isinstance(study, CapacityStudy)
    assert (study.capacity, study.first_failing) == (800.0, None)
    assert [level.rate for level in study.levels] == [400.0, 800.0]
    assert all(level.good.estimate == 1.0 for level in study.levels)


async def test_without_a_limit_there_is_no_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    assert await asyncio.to_thread(main, ["capacity", "--slo", "speed:3"]) == 2
    assert "--slo speed:3" in capsys.readouterr().err
