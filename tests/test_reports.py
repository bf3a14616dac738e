"""Reports: comparing two files, plots' arithmetic, and the page in a real browser, offline."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from specserve_loadgen.cli import main as loadgen_main
from specserve_loadgen.intervals import Interval
from specserve_loadgen.reports import svg
from specserve_loadgen.reports.command import main
from specserve_loadgen.reports.document import Document, Section, Table, with_interval
from specserve_loadgen.reports.html import render_html
from specserve_loadgen.reports.measurements import Measurement, compared, ratio_of
from specserve_loadgen.study import main as study_main
from tests.browser import a_browser
from tests.loadgen_server import Script, ScriptedServer, Step, serving
from tests.study_server import StudyServer


def study_to(folder: Path, name: str, chance: float, *more: str) -> Path:
    """The JSON and page of a small study; more: options"""

    async def run() -> None:
        async with serving(StudyServer(lambda one, at: chance).app()) as url:
            arguments = ["acceptance", "--url", url, "--arms", "flat:3", *more]
            arguments += ["--json", str(folder / f"{name}.json"), "--per-category", "4"]
            arguments += ["--html", str(folder / f"{name}.html")]
            assert await asyncio.to_thread(study_main, arguments) == 0

    asyncio.run(run())
    return folder / f"{name}.json"


def test_two_studies_are_compared_number_by_number_and_a_real_difference_is_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    low, high = study_to(tmp_path, "low", 0.4), study_to(tmp_path, "high", 0.7)
    capsys.readouterr()
    assert main([str(low), str(high), "--html", str(tmp_path / "both.html")]) == 0
    out = capsys.readouterr().out
    of_all = "arm flat:3, temperature 0, concurrency 1 "
    line = next(x for x in out.split("\n") if x.startswith(of_all) and "  acceptance_rate  " in x)
    assert "yes (" in line
    assert "high.json (B) against low.json (A)" in (tmp_path / "both.html").read_text()
    assert main([str(low), str(low)]) == 0
    assert "yes (" not in capsys.readouterr().out


def test_the_ratio_of_two_runs_is_as_uncertain_as_both_of_them_together() -> None:
    ratio = ratio_of(Interval(2.0, 1.6, 2.5, 30), Interval(3.0, 2.4, 3.75, 40))
    assert ratio is not None
    assert ratio.estimate == pytest.approx(1.5)
    # Each reaches by a factor of 1.25; together by 1.25 ** sqrt(2).
    assert (ratio.low, ratio.high) == pytest.approx((1.5 / 1.25**2**0.5, 1.5 * 1.25**2**0.5))
    assert ratio_of(Interval(0.0, 0.0, 0.1, 30), Interval(1.0, 0.9, 1.1, 30)) is None
    few = ratio_of(Interval(1.0, None, None, 3), Interval(1.0, 0.9, 1.1, 30))
    assert few is not None
    assert (few.low, few.high) == (None, None)


def test_only_what_both_files_measured_is_compared() -> None:
    one = Measurement({"arm": "a"}, "rate", Interval(0.5, 0.4, 0.6, 9))
    other = Measurement({"arm": "b"}, "rate", Interval(0.5, 0.4, 0.6, 9))
    assert compared([one], [other]).rows == ()
    assert len(compared([one, other], [other]).rows) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [("{", "is no report"), ('{"schema": "else/1"}', "holds 'else/1'"), (None, "No such file")],
)
def test_a_file_that_is_no_report_is_refused_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, why: str
) -> None:
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert main([str(path)]) == 2
    error = capsys.readouterr().err
    assert str(path) in error
    assert why in error


async def test_a_loadgen_run_has_a_page_and_numbers_with_intervals_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = (Step(), Step(drafted=3, accepted=2), Step(drafted=3, accepted=3))
    run, page, table = (tmp_path / name for name in ("run.json", "run.html", "run.csv"))
    async with serving(ScriptedServer([Script(steps=steps)]).app()) as url:
        arguments = ["--url", url, "--num-requests", "8", "--json", str(run), "--no-progress"]
        assert await asyncio.to_thread(loadgen_main, arguments) == 0
    assert main([str(run), "--html", str(page), "--csv", str(table)]) == 0
    assert "3.50 [3.50, 3.50]" in capsys.readouterr().out
    assert {"TTFT", "E2E"} <= set(re.findall(r"</svg>([^<]+)</li>", page.read_text()))
    assert "mean_acceptance_length,3.5,3.5,3.5,8" in table.read_text()


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 37, [0, 10, 20, 30]), (3, 3, [3])],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert svg.nice_ticks(low, high) == pytest.approx(ticks)


def test_a_log_scale_within_one_digit_has_ticks_too() -> None:
    """Between 3.1 and 3.4 ms lies none of 1, 2 and 5: such a page fell over."""
    axes = svg.Axes(x_label="ms", y_label="share", x_is_log=True)
    one = svg.Series("auto", (svg.Point(3.1, 0.0), svg.Point(3.4, 1.0)), 0)
    drawn = svg.curves([one], axes, "latency")
    assert ">3.2<" in drawn
    assert ">3.3<" in drawn


def test_a_cumulative_curve_ends_at_1_and_thins_out_thousands_of_values() -> None:
    points = svg.ecdf([float(value) for value in range(5000)])
    assert len(points) <= 120
    assert (points[0].x, points[-1].x, points[-1].y) == (0.0, 4999.0, 1.0)
    middle = min(points, key=lambda point: abs(point.y - 0.5))
    assert middle.x == pytest.approx(2500, rel=0.02)


def test_whatever_a_prompt_file_calls_its_categories_stays_text() -> None:
    evil = "<script>alert(1)</script>"
    axes = svg.Axes(x_label=evil, y_label=evil, x_names=(evil,))
    plot = svg.grouped([svg.Series(evil, (svg.Point(0, 1),), 0)], axes, evil)
    table = Table((evil,), ((evil,),))
    page = render_html(Document(evil, (evil,), (Section(evil, evil, (), (table,)),), ()))
    assert "<script" not in plot + page


def test_names_too_long_to_stand_side_by_side_are_slanted_and_whole() -> None:
    kinds = ("translation", "summarization", "humanities", "extraction") * 3
    points = tuple(svg.Point(at, 1.0) for at in range(len(kinds)))
    axes = svg.Axes(x_label="kind", y_label="y", x_names=kinds)
    plot = svg.grouped([svg.Series("one", points, 0)], axes, "by kind")
    assert plot.count("rotate(-35)") == len(kinds)
    assert plot.count(">summarization<") == 3
    few = svg.Axes(x_label="kind", y_label="y", x_names=kinds[:3])
    assert "rotate(-35)" not in svg.grouped([svg.Series("one", points[:3], 0)], few, "by kind")


def test_an_estimate_without_an_interval_says_so() -> None:
    assert with_interval(Interval(1.234, 1.1, 1.4, 9)) == "1.23 [1.10, 1.40]"
    assert with_interval(Interval(1.234, None, None, 3)) == "1.23 [too few]"
    assert with_interval(None) == "–"


def test_the_page_opens_offline_in_a_real_browser_in_light_and_dark(tmp_path: Path) -> None:
    study_to(tmp_path, "study", 0.6, "--concurrency", "1,2", "--temperatures", "0,1")
    page_file = tmp_path / "study.html"
    assert not re.search(r"(src|href)=|url\(|@import|<script", page_file.read_text())
    inks = {"light": "rgb(28, 32, 36)", "dark": "rgb(232, 235, 238)"}
    with a_browser() as browser:
        for scheme in ("light", "dark"):
            context = browser.new_context(offline=True, color_scheme=scheme)
            page = context.new_page()
            fetched: list[str] = []
            page.on("request", lambda request, to=fetched: to.append(request.url))
            page.on("console", lambda message, to=fetched: to.append(message.text))
            page.goto(page_file.as_uri())
            assert fetched == [page_file.as_uri()]
            heads = page.locator("h2").all_inner_texts()
            assert heads[:2] == ["All choices at a glance", "Acceptance by position"]
            assert "What it buys: speed-up" in heads
            assert "What it costs" in heads
            # Every mark of every plot lies inside its frame, and the page never scrolls sideways.
            assert page.evaluate(_MARKS_OUTSIDE) == 0
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.evaluate(_TABLES_CUT) == 0  # 1280 pixels show all choices whole
            assert page.evaluate("getComputedStyle(document.body).color") == inks[scheme]
            context.close()


_TABLES_CUT = """() => [...document.querySelectorAll('section:first-of-type .scroll')]
  .filter(box => box.scrollWidth > box.clientWidth).length"""
_MARKS_OUTSIDE = """() => [...document.querySelectorAll('figure > svg')].flatMap(plot => {
  const frame = plot.getBoundingClientRect();
  return [...plot.querySelectorAll('.mark, .area, .bar, text')].filter(mark => {
    const box = mark.getBoundingClientRect();
    return box.left < frame.left - 1 || box.right > frame.right + 1
      || box.top < frame.top - 1 || box.bottom > frame.bottom + 1;
  });
}).length"""
