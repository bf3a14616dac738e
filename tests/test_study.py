"""The never-slower study: what a cell's ratios are, and a whole run against a real server."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from specserve.server.keys import KeyRing
from specserve.server.state import ServerSettings
from specserve_loadgen.busy import busy_rate
from specserve_loadgen.client import limit_of, request_body
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.never_slower import (
    Arm,
    ArmResult,
    Cell,
    Plan,
    Study,
    make_cell,
    requests_per_round,
    run_study,
    workload_prompts,
)
from specserve_loadgen.never_slower_report import describe, render_study
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.records import Chunk
from specserve_loadgen.settings import Settings
from specserve_loadgen.study import main, parse_arm
from tests.http_server import a_server
from tests.scripted import says
from tests.test_peers_numbers import a_record


def an_arm(name: str, *speeds: float) -> ArmResult:
    return ArmResult(
        arm=name,
        tokens_per_second=speeds,
        num_output_tokens=10,
        acceptance_rate=None,
        mean_acceptance_length=None,
    )


def a_cell(auto: tuple[float, ...], off: tuple[float, ...], fixed: tuple[float, ...]):
    arms = [an_arm("auto", *auto), an_arm("off", *off), an_arm("ngram:3", *fixed)]
    return make_cell(4, "chat", arms, num_requests=8, same_output_tokens=True)


def test_ratios_are_of_the_same_round_so_a_drift_of_the_machine_cancels() -> None:
    cell = a_cell((10, 20, 40), (10, 20, 40), (8, 16, 32))
    assert cell.auto_over_off == 1.0
    assert cell.auto_over_off_range == (1.0, 1.0)
    assert cell.auto_over_best_fixed == 1.0
    assert cell.best_fixed == "off"  # not to speculate is a fixed choice, too


def test_the_best_fixed_choice_is_the_one_with_the_best_median() -> None:
    cell = a_cell((19,) * 5, (10,) * 5, (20, 20, 20, 20, 1))
    assert cell.best_fixed == "ngram:3"
    assert cell.auto_over_best_fixed == pytest.approx(0.95)
    assert cell.best_fixed_over_off == pytest.approx(2.0)


def test_answers_differ_in_length_evenly_and_alike_in_every_run() -> None:
    varied = Settings(url="", max_tokens=96, shortest=48)
    limits = [limit_of(varied, idx) for idx in range(490)]
    assert limits == [limit_of(varied, idx) for idx in range(490)]
    assert set(limits) == set(range(48, 97))
    assert all(8 <= limits.count(limit) <= 12 for limit in range(48, 97))
    assert limit_of(Settings(url="", max_tokens=96), 7) == 96


def test_speed_is_counted_while_every_user_is_busy() -> None:
    """Two users, three requests: from the last one sent on, one of them has nothing to do."""
    one = a_record()
    first = msgspec.structs.replace(one, ended=2.0, chunks=(Chunk(1.0, 3), Chunk(2.0, 5)))
    second = msgspec.structs.replace(one, ended=9.0, chunks=(Chunk(1.5, 2), Chunk(9.0, 90)))
    third = msgspec.structs.replace(one, sent=2.0, ended=4.0, chunks=(Chunk(3.0, 70),))
    assert busy_rate([first, second, third]) == (3 + 5 + 2) / 2.0
    assert busy_rate([first, second]) == (3 + 5 + 2) / 2.0  # one request per user


@pytest.mark.parametrize(
    ("auto", "off", "fixed", "holds"),
    [
        (98.0, 100.0, 50.0, True),
        (97.9, 100.0, 50.0, False),
        (150.0, 100.0, 154.0, True),
        (149.0, 100.0, 154.0, False),
    ],
)
def test_a_cell_holds_down_to_98_percent_of_off_and_97_of_the_best(
    auto: float, off: float, fixed: float, holds: bool
) -> None:
    assert a_cell((auto,), (off,), (fixed,)).holds is holds


def test_a_cell_is_sure_once_no_interval_has_its_goal_inside() -> None:
    off = (100.0,) * 6
    below = (90.0,) * 6
    assert a_cell((101.0,) * 6, off, below).is_sure
    assert not a_cell((101.0,) * 5, off[:5], below[:5]).is_sure  # five rounds tell nothing
    unsure = a_cell((97.0, 97.5, 98.5, 99.0, 99.5, 100.0), off, below)
    assert unsure.holds
    assert not unsure.is_sure
    slower = a_cell((90.0, 91.0, 92.0, 93.0, 94.0, 95.0), off, (1.0,) * 6)
    assert not slower.holds
    assert slower.is_sure
    behind_best = a_cell((110.0,) * 6, off, (120.0,) * 6)
    assert not behind_best.holds
    assert behind_best.is_sure


async def test_a_cell_that_is_not_sure_gets_more_rounds_up_to_the_most() -> None:
    async with a_server(says("one two three four five six", then=None)) as server:
        plan = Plan(
            url=f"http://127.0.0.1:{server.port}",
            fixed=(),
            concurrencies=(1,),
            workloads=("chat",),
            rounds=2,  # six rounds at least make an interval
            most_rounds=4,
            max_tokens=4,
        )
        study = await run_study(plan, lambda cell: None)
    (cell,) = study.cells
    assert not cell.is_sure
    assert {len(arm.tokens_per_second) for arm in cell.arms} == {4}
    assert "not sure" in describe(cell)
    assert "1 of them not for sure" in render_study(study)


def test_random_prompts_repeat_with_the_seed_and_differ_from_one_another() -> None:
    prompts = workload_prompts("random", 3)
    assert prompts == workload_prompts("random", 3)
    assert len({prompt.messages for prompt in prompts}) == len(prompts)
    assert prompts != workload_prompts("random", 4)


def test_a_fixed_choice_names_drafter_and_k() -> None:
    assert parse_arm("suffix:7") == Arm("suffix:7", "suffix", 7)


@pytest.mark.parametrize("text", ["suffix", "suffix:0", ":3", "suffix:x", "suffix:-1"])
def test_a_fixed_choice_without_them_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(LoadgenError, match=f"--fixed {text}"):
        parse_arm(text)


async def test_a_study_of_a_real_server_measures_every_arm_and_sees_equal_texts() -> None:
    async with a_server(says("one two three four five six", then=None)) as server:
        plan = Plan(
            url=f"http://127.0.0.1:{server.port}",
            fixed=(Arm("oracle:3", "oracle", 3), Arm("anti:3", "anti", 3)),
            concurrencies=(1, 3),
            workloads=("chat",),
            rounds=2,
            most_rounds=2,
            max_tokens=12,
        )
        cells: list[Cell] = []
        study = await run_study(plan, cells.append)
    assert [cell.concurrency for cell in study.cells] == [1, 3]
    assert tuple(cells) == study.cells
    for cell in study.cells:
        by_name = {arm.arm: arm for arm in cell.arms}
        assert set(by_name) == {"auto", "off", "oracle:3", "anti:3"}
        assert all(len(arm.tokens_per_second) == 2 for arm in cell.arms)
        assert cell.same_output_tokens
        assert by_name["oracle:3"].acceptance_rate == 1.0
        assert by_name["anti:3"].acceptance_rate == 0.0
        assert by_name["off"].acceptance_rate is None
    assert msgspec.json.decode(msgspec.json.encode(study), type=Study) == study


@pytest.mark.parametrize(
    ("seconds", "warm_up", "num_requests"), [(None, 9.0, 8), (60.0, 4.0, 16), (20.0, 9.0, 4)]
)
def test_a_cell_sends_what_fits_into_its_seconds_and_at_least_one_request_per_user(
    seconds: float | None, warm_up: float, num_requests: int
) -> None:
    plan = Plan(url="", fixed=(), rounds=3, requests_per_user=2, seconds_per_cell=seconds)
    assert requests_per_round(plan, 4, warm_up) == num_requests


async def test_a_server_with_keys_is_studied_with_one_and_no_report_holds_it() -> None:
    settings = ServerSettings(keys=KeyRing(["secret-key"]))
    async with a_server(says("one two three", then=None), settings=settings) as server:
        url = f"http://127.0.0.1:{server.port}"
        plan = Plan(
            url=url,
            fixed=(),
            concurrencies=(1,),
            workloads=("chat",),
            rounds=1,
            most_rounds=1,
            max_tokens=4,
        )
        with pytest.raises(LoadgenError, match="401"):
            await run_study(plan, lambda cell: None)
        study = await run_study(plan, lambda cell: None, "secret-key")
    assert len(study.cells) == 1
    assert b"secret-key" not in msgspec.json.encode(study)


def test_a_request_of_its_own_salt_can_be_guessed_from_nothing_that_was_said_before() -> None:
    prompts = load_prompts(None, ["chat"])
    salted = Settings(url="", cache_salt="s", salt_per_request=True)
    bodies = [msgspec.json.decode(request_body(salted, "m", prompts[0], idx)) for idx in (0, 1)]
    assert [body["cache_salt"] for body in bodies] == ["s/0", "s/1"]


async def test_an_adversarial_cell_has_the_wrong_drafter_as_a_fixed_choice() -> None:
    async with a_server(says("one two three four five six", then=None)) as server:
        plan = Plan(
            url=f"http://127.0.0.1:{server.port}",
            fixed=(Arm("oracle:3", "oracle", 3),),
            concurrencies=(2,),
            workloads=("adversarial",),
            rounds=1,
            most_rounds=1,
            max_tokens=12,
            seconds_per_cell=0.5,
        )
        study = await run_study(plan, lambda cell: None)
    (cell,) = study.cells
    by_name = {arm.arm: arm for arm in cell.arms}
    assert set(by_name) == {"auto", "off", "oracle:3", "anti:3"}
    assert by_name["anti:3"].acceptance_rate == 0.0
    limits = Settings(url="", max_tokens=12, shortest=6)
    wanted = sum(limit_of(limits, idx) for idx in range(cell.num_requests))
    assert by_name["off"].num_output_tokens == wanted
    assert cell.same_output_tokens


async def test_a_choice_that_the_server_has_not_is_refused_before_anything_runs() -> None:
    async with a_server(says("one two three", then=None)) as server:
        plan = Plan(url=f"http://127.0.0.1:{server.port}", fixed=(Arm("eagle3:3", "eagle3", 3),))
        with pytest.raises(LoadgenError, match=r"refuses eagle3:3 .*--drafters"):
            await run_study(plan, lambda cell: None)


def test_without_a_server_the_study_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "study.json"
    code = main(["never-slower", "--url", "http://127.0.0.1:9", "--json", str(file)])
    assert code == 2
    assert "no server answers" in capsys.readouterr().err
    assert not file.exists()
