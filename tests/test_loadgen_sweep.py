"""`loadgen --sweep`: which levels are asked, what their speed is, and where it stops."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web

from specserve_loadgen.cli import main
from specserve_loadgen.intervals import Interval
from specserve_loadgen.reports.command import main as report_main
from specserve_loadgen.reports.files import read_report
from specserve_loadgen.sweep import Sweep, SweepLevel, busy_speed, is_saturated
from tests.loadgen_server import app_with, serving, write_stream
from tests.test_peers_numbers import a_record

ANSWER = b'data: {"choices":[{"text":"a","token_ids":[1]}]}\n\n'
DONE = b"data: [DONE]\n\n"


def a_level(users: int, speed: float | None) -> SweepLevel:
    return SweepLevel(
        users=users,
        num_requests=4 * users,
        num_failed=0,
        tokens_per_second=None if speed is None else Interval(speed, None, None, 1),
        ttft_p50=None,
        ttft_p99=None,
        itl=None,
        good=None,
        warnings=(),
    )


@pytest.mark.parametrize(
    ("speeds", "saturated"),
    [
        ([], False),
        ([100.0], False),
        ([100.0, 190.0], False),
        ([100.0, 190.0, 199.0], True),  # 4.7 % more
        ([100.0, 190.0, 200.0], False),
        ([100.0, 90.0], True),
        ([None, None], False),  # speeds are unknown: only the limit ends it
    ],
)
def test_it_is_saturated_when_twice_the_users_bring_less_than_5_percent_more(
    speeds: list[float | None], saturated: bool
) -> None:
    levels = [a_level(2**at, speed) for at, speed in enumerate(speeds)]
    assert is_saturated(levels) is saturated


def test_speed_counts_only_the_time_in_which_every_user_was_busy() -> None:
    """Two users, a token each 0.1 s, for 2 s; then one alone for another 2 s."""
    gaps = (0.1,) * 9
    busy = [a_record(sent=at, first=0.1, gaps=gaps) for at in (0.0, 0.0, 1.0, 1.0)]
    last = a_record(sent=2.0, first=0.1, gaps=gaps * 2)
    speed = busy_speed([*busy, last])
    assert speed is not None
    assert speed.estimate == pytest.approx(20.0, rel=0.06)  # the last token lies on the border
    assert speed.low is not None
    assert busy_speed([a_record(), a_record()]) is None  # all sent at once


async def swept(owner: str, *options: str) -> tuple[int, list[dict[str, object]], int]:
    """The exit code, all bodies, and the most requests that were open at a time."""
    bodies: list[dict[str, object]] = []
    num_open = most_open = 0

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": owner}]})

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_open, most_open
        bodies.append(await request.json())
        num_open += 1
        most_open = max(most_open, num_open)
        response = await write_stream(request, ANSWER, ANSWER, DONE)
        num_open -= 1
        return response

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", complete)
    async with serving(app) as url:
        code = await asyncio.to_thread(main, ["--url", url, *options])
    return code, bodies, most_open


async def test_each_level_has_four_requests_per_user_and_a_cache_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.json"
    options = ["--sweep", "4", "--num-requests", "6", "--slo", "e2e:60000", "--json", str(file)]
    code, bodies, most_open = await swept("specserve", *options)
    sweep = read_report(file)
    assert code == 0
    assert isinstance(sweep, Sweep)
    levels = [level.users for level in sweep.levels]
    assert levels == [1, 2, 4][: len(levels)]
    assert most_open <= max(levels)
    asked = Counter(body["cache_salt"] for body in bodies)
    assert asked == {f"sweep/0/{users}": max(6, 4 * users) for users in levels}
    assert [level.num_requests for level in sweep.levels] == list(asked.values())
    assert all(level.good is not None and level.good.estimate == 1 for level in sweep.levels)
    assert (sweep.saturated_at is None) is not is_saturated(sweep.levels)
    shown = capsys.readouterr()
    assert "How many users saturate m?" in shown.out
    assert shown.err.startswith("1 user: ")
    page = tmp_path / "page.html"
    assert report_main([str(file), "--html", str(page)]) == 0
    assert page.read_text().count("<figure") == 2
    assert report_main([str(file), str(file)]) == 0  # comparable, level by level


async def test_a_server_that_may_not_know_salts_is_sent_none_and_the_report_says_what_that_means(
    tmp_path: Path,
) -> None:
    file = tmp_path / "sweep.json"
    _, bodies, _ = await swept("somebody", "--sweep", "1", "--json", str(file))
    assert not any("cache_salt" in body for body in bodies)
    notes = json.loads(file.read_text())["notes"]
    assert any("with a prefix cache later levels start faster" in note for note in notes)


async def test_a_level_of_failures_ends_the_sweep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        raise web.HTTPServiceUnavailable(text="busy")

    file = tmp_path / "sweep.json"
    async with serving(app_with(refuse)) as url:
        options = ["--url", url, "--sweep", "--num-requests", "4", "--json", str(file)]
        assert await asyncio.to_thread(main, options) == 1
    sweep = read_report(file)
    assert isinstance(sweep, Sweep)
    assert [(level.users, level.num_failed) for level in sweep.levels] == [(1, 4)]
    assert "4 failed" in capsys.readouterr().err


def test_a_sweep_is_a_load_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sweep", "--rate", "3"]) == 2
    assert "not allowed with argument" in capsys.readouterr().err
