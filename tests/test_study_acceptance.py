"""`study acceptance` against a server whose acceptance is written down, from command to files."""

from __future__ import annotations

import asyncio
import csv
import json
import time
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.reports.command import main as report_main
from specserve_loadgen.reports.files import document_of, measurements_of, read_report
from specserve_loadgen.reports.html import render_html
from specserve_loadgen.reports.text import render_text
from specserve_loadgen.studies import cells
from specserve_loadgen.studies.acceptance import AcceptanceStudy, Plan, run_acceptance
from specserve_loadgen.studies.arms import OFF, Arm, parse_arm, parse_arms
from specserve_loadgen.studies.cells import Target
from specserve_loadgen.studies.summary import num_at_risk, summarise
from specserve_loadgen.study import main
from specserve_loadgen.wire import SpeculativeDecoding
from tests.http_server import a_server
from tests.loadgen_server import serving
from tests.scripted import says
from tests.study_server import Asked, StudyServer
from tests.test_peers_numbers import a_record

CHANCES = (0.8, 0.5, 0.5, 0.25)


def flat_or_falling(one: Asked, at: int) -> float:
    if one.drafter == "flat":
        return 0.6
    return 0.0 if one.drafter == "wrong" else CHANCES[at]


async def a_study(server: StudyServer, *arms: str, **changes: object) -> AcceptanceStudy:
    async with serving(server.app()) as url:
        plan = Plan(
            target=Target(url=url, max_tokens=60),
            arms=(OFF, *(parse_arm("--arms", arm) for arm in arms)),
            **changes,  # type: ignore[arg-type]  # by name
        )
        return await run_acceptance(plan, lambda line: None)


async def test_each_rate_is_found_and_its_interval_is_narrow() -> None:
    study = await a_study(StudyServer(flat_or_falling), "falling:4", "flat:3", "wrong:2")
    by_arm = {cell.arm.name: cell.summary for cell in study.cells}
    for place, truth in zip(by_arm["falling:4"].positions, CHANCES, strict=True):
        assert place.conditional is not None
        assert place.conditional.low is not None
        assert place.conditional.high is not None
        assert place.conditional.estimate == pytest.approx(truth, abs=0.08)
        assert place.conditional.low < place.conditional.estimate < place.conditional.high
        assert place.conditional.high - place.conditional.low < 0.25
    flat = by_arm["flat:3"]
    assert flat.mean_acceptance_length is not None
    # (1 - a ** (K + 1)) / (1 - a), a little less for the shorter drafts at the end of each text.
    assert flat.mean_acceptance_length.estimate == pytest.approx(2.176, abs=0.1)
    assert by_arm["wrong:2"].acceptance_rate is not None
    assert by_arm["wrong:2"].acceptance_rate.estimate == 0.0
    assert by_arm["wrong:2"].num_wasted_draft_tokens == by_arm["wrong:2"].num_draft_tokens
    assert by_arm["off"].acceptance_rate is None
    assert {cell.num_different for cell in study.cells if cell.arm != OFF} == {0}


def test_marginal_and_conditional_rates_are_exact_where_drafts_differ_in_length() -> None:
    """Two requests: drafts of 3, 1, 2 and of 2; accepted 3, 1, 0 and 1."""

    def a_reply(drafted: list[int], accepted: list[int]):
        spec = SpeculativeDecoding(
            num_spec_steps=len(drafted),
            num_draft_tokens=sum(drafted),
            num_accepted_draft_tokens=sum(accepted),
            mean_acceptance_length=1 + sum(accepted) / len(drafted),
            acceptance_histogram=[accepted.count(run) for run in range(4)],
            num_spec_tokens=3,
            per_step_drafted=drafted,
            per_step_accepted=accepted,
        )
        known = a_record()
        fields = {name: getattr(known, name) for name in known.__struct_fields__}
        return type(known)(**fields | {"speculative": spec, "specserve": None})

    records = [a_reply([3, 1, 2], [3, 1, 0]), a_reply([2], [1])]
    summary = summarise(records)
    assert [p.num_drafted for p in summary.positions] == [4, 3, 1]
    assert [p.num_accepted for p in summary.positions] == [3, 1, 1]
    assert [p.num_at_risk for p in summary.positions] == [4, 2, 1]  # not the draft that ended
    marginal = [p.marginal.estimate for p in summary.positions if p.marginal]
    conditional = [p.conditional.estimate for p in summary.positions if p.conditional]
    assert marginal == pytest.approx([3 / 4, 1 / 3, 1.0])
    assert conditional == pytest.approx([3 / 4, 1 / 2, 1.0])
    assert summary.runs == (1, 2, 0, 1)
    spec = records[0].speculative
    assert spec is not None
    assert num_at_risk(spec) == [3, 1, 1]


async def test_without_single_steps_only_marginal_rates_are_known_and_the_page_says_so() -> None:
    study = await a_study(StudyServer(flat_or_falling, with_steps=False), "flat:3", per_category=2)
    flat = study.cells[1].summary
    assert [p.conditional for p in flat.positions] == [None] * 3
    assert all(p.marginal is not None for p in flat.positions)
    assert any("conditional rates are unknown" in note for note in study.notes)
    page = render_html(document_of(study))
    assert "Marginal acceptance by position" in page
    assert "Conditional acceptance by position" not in page


async def test_every_arm_is_asked_the_same_prompts_with_the_same_seeds_in_rotating_order() -> None:
    server = StudyServer(flat_or_falling)
    study = await a_study(server, "flat:3", per_category=2, block_size=3, concurrencies=(1, 2))
    asked: dict[object, set[tuple[object, object]]] = {}
    order = []
    for body in server.bodies[6:]:  # behind the checks and the warm-up
        speculation = body["speculation"]
        assert isinstance(speculation, dict)
        drafter = speculation["drafter"]
        messages = body["messages"]
        assert isinstance(messages, list)
        asked.setdefault(drafter, set()).add((messages[0]["content"], body["seed"]))
        order.append(drafter)
    assert asked["none"] == asked["flat"]
    assert len(asked["none"]) == study.num_asked == study.num_prompts
    assert order[:3] == ["none"] * 3
    assert order[12:15] == ["flat"] * 3  # the second block begins with the other
    assert {(c.arm.name, c.concurrency) for c in study.cells} == {
        ("off", 1), ("flat:3", 1), ("off", 2), ("flat:3", 2),
    }  # fmt: skip


async def test_a_choices_phases_are_its_own_and_come_from_the_servers_counters() -> None:
    server = StudyServer(flat_or_falling)
    study = await a_study(server, "flat:3", "wrong:2", per_category=2)
    for cell in study.cells:
        steps = cell.summary.num_steps
        assert cell.phases["target_forward"] == pytest.approx(0.010 * steps)
        assert cell.phases["draft"] == pytest.approx(0.001 * cell.summary.num_draft_tokens)
    shown = render_text(document_of(study))
    off = study.cells[0].summary
    assert f"off 0.000 (0%) {10 * off.num_steps / off.num_output_tokens:.3f}" in " ".join(
        shown.split()
    )


async def test_a_study_of_the_real_server_finds_what_its_drafters_are_made_for() -> None:
    async with a_server(says("one two three four five six", then=None)) as server:
        plan = Plan(
            target=Target(url=f"http://127.0.0.1:{server.port}", max_tokens=40),
            arms=(OFF, Arm("oracle:3", "oracle", 3), Arm("anti:2", "anti", 2)),
            categories=("chat",),
            per_category=6,
            block_size=1,
        )
        study = await run_acceptance(plan, lambda line: None)
    by_arm = {cell.arm.name: cell for cell in study.cells}
    oracle, anti = by_arm["oracle:3"], by_arm["anti:2"]
    assert oracle.summary.acceptance_rate is not None
    assert oracle.summary.acceptance_rate.estimate == 1.0
    assert [p.num_accepted for p in anti.summary.positions] == [0, 0]
    assert anti.summary.positions[1].num_at_risk == 0
    assert oracle.num_different == anti.num_different == 0
    assert oracle.num_blocks == 6
    assert oracle.speed_up is not None
    assert oracle.speed_up.low is not None
    text = render_text(document_of(study))
    assert "All 12 replies with speculation are the ones without it, token for token." in text


async def test_the_command_writes_json_csv_and_a_page_and_report_reads_them_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {kind: tmp_path / f"study.{kind}" for kind in ("json", "csv", "html")}
    async with serving(StudyServer(flat_or_falling).app()) as url:
        arguments = ["acceptance", "--url", url, "--arms", "falling:4", "--api-key", "secret"]
        arguments += ["--temperatures", "0,0.7", "--per-category", "3"]
        for kind, path in files.items():
            arguments += [f"--{kind}", str(path)]
        assert await asyncio.to_thread(main, arguments) == 0
    printed = capsys.readouterr().out
    study = read_report(files["json"])
    assert isinstance(study, AcceptanceStudy)
    assert render_text(document_of(study)) in printed
    assert "secret" not in files["json"].read_text() + files["html"].read_text()
    assert json.loads(files["json"].read_text())["schema"] == "specserve.study.acceptance/1"
    rows = list(csv.DictReader(files["csv"].read_text().splitlines()))
    assert len(rows) == len(measurements_of(study))
    one = next(r for r in rows if r["measure"] == "conditional_acceptance" and r["position"] == "1")
    assert (one["arm"], one["temperature"]) == ("falling:4", "0")
    assert float(one["low_95"]) < float(one["estimate"]) < float(one["high_95"])
    assert report_main([str(files["json"]), "--html", str(tmp_path / "again.html")]) == 0
    assert (tmp_path / "again.html").read_text() == files["html"].read_text()


async def test_a_drafter_that_the_server_refuses_is_found_out_before_anything_is_measured() -> None:
    async with a_server(says("one two", then=None)) as server:
        plan = Plan(
            target=Target(url=f"http://127.0.0.1:{server.port}"),
            arms=(OFF, Arm("nobody:3", "nobody", 3)),
        )
        with pytest.raises(LoadgenError, match=r"nobody:3.*http_400.*nobody"):
            await run_acceptance(plan, lambda line: None)


async def test_however_short_its_time_a_study_asks_one_block_and_says_what_it_left_out() -> None:
    study = await a_study(StudyServer(), "flat:3", seconds=1e-9, block_size=3, per_category=1)
    assert study.num_asked == 3 < study.num_prompts
    assert (
        study.notes[0] == f"stopped after 3 of {study.num_prompts} prompts; every arm had the same"
    )


async def test_a_server_that_fails_half_way_leaves_a_report_of_what_was_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(one: Asked) -> None:
        if len(server.bodies) == 30:
            raise web.HTTPServiceUnavailable(text="gone")

    server = StudyServer(flat_or_falling, on_request=breaks)
    async with serving(server.app()) as url:
        arguments = ["acceptance", "--url", url, "--arms", "flat:3", "--block", "5"]
        arguments += ["--html", str(tmp_path / "page.html")]
        assert await asyncio.to_thread(main, arguments) == 1
    assert "A request failed, which ended the study early: " in capsys.readouterr().out
    page = (tmp_path / "page.html").read_text()
    assert "http_503: gone" in page
    assert (
        "10 prompts of " in page
    )  # 6 requests before, then whole blocks of 5 by 2 arms: 2 of them


async def test_a_study_that_was_stopped_goes_on_behind_its_last_whole_block(tmp_path: Path) -> None:
    server, kept = StudyServer(flat_or_falling), tmp_path / "blocks"
    async with serving(server.app()) as url:
        whole = Plan(
            target=Target(url=url, max_tokens=60),
            arms=(OFF, Arm("flat:3", "flat", 3)),
            per_category=1,
            block_size=3,
        )
        piece = msgspec.structs.replace(whole, seconds=1e-9)
        at_once = await run_acceptance(whole, lambda line: None)
        first = await run_acceptance(piece, lambda line: None, resume=kept)
        kept.write_bytes(
            kept.read_bytes() + b'{"seconds":3.5,"runs":['
        )  # power failed while it wrote
        second = await run_acceptance(piece, lambda line: None, resume=kept)
        last = await run_acceptance(whole, lambda line: None, resume=kept)
        asked_before = len(server.bodies)
        again = await run_acceptance(whole, lambda line: None, resume=kept)
        assert len(server.bodies) == asked_before  # nothing is left to ask
        other = msgspec.structs.replace(whole, block_size=4)
        with pytest.raises(LoadgenError, match=f"--resume {kept}: another study was begun there"):
            await run_acceptance(other, lambda line: None, resume=kept)
    assert [first.num_asked, second.num_asked, last.num_asked] == [3, 6, last.num_prompts]
    assert first.seconds < second.seconds < last.seconds == again.seconds
    assert [cell.summary for cell in last.cells] == [cell.summary for cell in at_once.cells]
    assert again.cells == last.cells


async def test_a_block_in_which_the_machine_slept_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cells, "STANDSTILL_SECONDS", 0.5)

    def sleeps(one: Asked) -> None:
        if len(server.bodies) == 7:  # the first behind two checks and four for warming up
            time.sleep(0.7)  # the whole process, as when a laptop's lid is closed

    server = StudyServer(flat_or_falling, on_request=sleeps)
    study = await a_study(server, "flat:3", per_category=1, block_size=3, seconds=1e-9)
    first = [body for body in server.bodies[6:] if body["speculation"]["drafter"] == "none"]  # type: ignore[index]
    assert len(first) >= 6  # a busy machine may have stood still more often
    assert len({str(body["cache_salt"]) for body in first}) == len(first)
    assert [cell.summary.num_requests for cell in study.cells] == [3, 3]


def test_a_file_that_holds_no_blocks_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").write_text("no study\n")
    arguments = ["acceptance", "--resume", str(tmp_path / "notes")]
    assert main(arguments) == 2
    assert f"--resume {tmp_path / 'notes'}: another study" in capsys.readouterr().err
    assert (tmp_path / "notes").read_text() == "no study\n"


@pytest.mark.parametrize("text", ["suffix", "suffix:0", ":3", "suffix:x", "suffix:3@law"])
def test_a_choice_that_is_none_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(LoadgenError, match=f"--arms {text}"):
        parse_arms("--arms", text)


def test_choices_may_name_a_rule() -> None:
    assert parse_arm("--arms", "eagle3:5@block") == Arm("eagle3:5@block", "eagle3", 5, "block")
    assert parse_arm("--arms", "auto") == Arm("auto", "auto", None)
    with pytest.raises(LoadgenError, match="twice"):
        parse_arms("--arms", "auto,auto")
