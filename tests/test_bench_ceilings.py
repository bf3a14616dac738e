"""Speculation at given acceptance: the ceiling's arithmetic, what is timed, and a whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specserve.bench.ceilings import ceiling, summarise
from specserve.cli import main
from specserve_observability.records import RowRecord, StepRecord
from tests.training_world import a_target


def a_step(start: float, *emitted: int, prefill: bool = False) -> StepRecord:
    rows = tuple(
        RowRecord(f"{idx}", None, "synthetic", 1, 3, count - 1, count, is_prefill=prefill)
        for idx, count in enumerate(emitted)
    )
    return StepRecord(
        step_idx=0,
        plan_start=start,
        plan_end=start,
        draft_start=start + 0.001,
        forward_start=start + 0.002,
        verify_start=start + 0.007,
        verify_end=start + 0.009,
        commit_end=start + 0.01,
        rows=rows,
        num_running=len(rows),
        num_waiting=0,
        blocks_free=0,
        blocks_cached=0,
        blocks_live=0,
        token_budget=512,
        num_preempted=0,
    )


def test_where_guesses_are_free_the_ceiling_is_what_all_of_them_emit() -> None:
    assert ceiling(0.5, [0.01] * 8, 1) == (7, pytest.approx(2 - 0.5**7))
    assert ceiling(0.5, [0.01] * 15, 2) == (7, pytest.approx(2 - 0.5**7))


def test_the_ceiling_weighs_tokens_against_what_their_forward_costs() -> None:
    steep = [0.01 * (1 + at) for at in range(9)]  # every token costs as much as the first
    assert ceiling(0.5, steep, 1) == (0, 1.0)  # not to guess is a choice, too
    rising = [0.01 * (1 + at / 4) for at in range(9)]
    assert ceiling(0.5, rising, 1) == (1, pytest.approx(1.5 / 1.25))
    tile = [0.01] * 4 + [0.02] * 5  # three guesses are free, the next ones double the cost
    assert ceiling(0.9, tile, 1) == (3, pytest.approx((1 - 0.9**4) / 0.1))


def test_only_steps_in_which_all_rows_decode_are_timed() -> None:
    steps = [
        a_step(0.0, 1, 1, prefill=True),
        a_step(1.0, 2, 4),
        a_step(1.1, 1, 3),
        a_step(1.3, 4, 4),  # after it a row is gone: how long it took is not known
        a_step(1.4, 4),
    ]
    timed = summarise("auto", steps, batch=2)
    assert timed.tokens_per_step == 5
    assert timed.step_ms == pytest.approx(150)
    assert timed.tokens_per_second == pytest.approx(10 / 0.3)
    assert timed.forward_ms == pytest.approx(5)
    assert timed.draft_ms == pytest.approx(1)
    assert timed.verify_ms == pytest.approx(2)


def test_a_run_meets_the_acceptance_it_was_given_and_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, file = tmp_path / "target", tmp_path / "ceilings.json"
    target.mkdir()
    arguments = ["bench", "ceilings", "--model", str(a_target(target)), "--threads", "1"]
    arguments += ["--alpha", "0.7", "--batch", "1,16", "--tokens", "120", "--rounds", "1"]
    code = main([*arguments, "--json", str(file)])
    report = json.loads(file.read_text())
    assert [cell["batch"] for cell in report["cells"]] == [1, 16]
    shown = capsys.readouterr().out
    for cell in report["cells"]:
        by_arm = {arm["arm"]: arm for arm in cell["arms"]}
        assert {"off", "auto", "1"} <= set(by_arm)
        assert by_arm["off"]["tokens_per_step"] == cell["batch"]
        assert by_arm["off"]["speed_up"] == 1
        assert cell["ceiling"] >= 1
        assert f"{by_arm['auto']['speed_up']:.2f}" in shown
    many = {arm["arm"]: arm for arm in report["cells"][1]["arms"]}
    assert many["1"]["tokens_per_step"] / 16 == pytest.approx(1.7, abs=0.12)
    reached = [
        next(arm["speed_up"] for arm in cell["arms"] if arm["arm"] == "auto")
        >= 0.8 * cell["ceiling"]
        for cell in report["cells"]
    ]
    assert code == (0 if all(reached) else 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--alpha", "1"], "--alpha"),
        (["--alpha", "often"], "--alpha"),
        (["--batch", "0"], "--batch"),
        (["--tokens", "5"], "--tokens"),
        (["--rounds", "0"], "--rounds"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_its_option(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "ceilings", *arguments]) == 2
    assert said in capsys.readouterr().err
