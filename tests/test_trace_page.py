"""The trace viewer's page in a real browser: what a person sees and can do, by mouse and keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Browser, Locator, Page, expect

from specserve_observability.otlp_reading import read_spans
from specserve_observability.trace_facts import time_by_phase
from tests.browser import Visit, a_browser, visit
from tests.otlp_lines import a_line, a_span, overlapping_spans
from tests.trace_reading import FileTracing
from tests.trace_records import Row, a_step, play, trace_id
from tests.trace_viewing import a_viewer_in_a_thread

pytestmark = pytest.mark.timeout(300)
expect.set_options(timeout=30_000)

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;"
FOCUSED = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.id"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as one:
        yield one


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two requests that share two of four steps; in the last step the engine failed."""
    run = FileTracing(tmp_path_factory.mktemp("traces") / "t.jsonl")
    steps, requests = play(
        [
            [Row(0)],
            [Row(0, drafted=3, accepted=2), Row(1, "suffix", 2, 0)],
            [Row(0, drafted=3, accepted=3), Row(1, "suffix", 2, 1)],
        ]
    )
    for step in (*steps, a_step(3, error="out of memory")):
        run.tracing.recorder.record_step(step)
    for request in requests:
        run.tracing.recorder.record_request(request)
    run.tracing.shutdown()
    return run.path


@contextmanager
def opened(browser: Browser, path: Path, **context: Any) -> Iterator[Visit]:
    with a_viewer_in_a_thread(path) as viewer, visit(browser, viewer, **context) as one:
        expect(one.page.locator("#results li").first).to_be_visible()
        yield one


def row(page: Page, name: str) -> Locator:
    """The rows whose names on the left hold this."""
    return page.locator("[role=treeitem]").filter(has=page.locator(".name", has_text=name))


def choose(page: Page, name: str) -> None:
    page.locator("#results a", has_text=name).first.click()
    expect(page.locator("#trace")).to_be_visible()


def names(page: Page) -> list[str]:
    return page.locator("[role=treeitem] > .line .words").all_inner_texts()


def test_traces_are_listed_and_a_request_shows_where_its_time_went(
    browser: Browser, played: Path
) -> None:
    with opened(browser, played) as one:
        page = one.page
        expect(page.locator("#status")).to_contain_text("spans in 3 traces")
        expect(page.locator("#results li")).to_have_count(3)
        page.goto(f"{one.origin}/#trace={trace_id(0)}")
        expect(page.locator("#facts")).to_contain_text("req-0")
        facts = page.locator("#facts").inner_text().replace("\n", " ")
        assert "Took 1.00 s" in facts
        assert "Guesses accepted 5 of 6 (83 %)" in facts
        assert "First token after 400 ms" in facts
        assert "Tokens per step 3.50" in facts
        legend = page.get_by_role("list", name="Where its time went").inner_text()
        assert legend.split("\n") == [
            "decode 600 ms (60 %)",
            "queue 200 ms (20 %)",
            "prefill 200 ms (20 %)",
        ]
        assert names(page) == ["queue", "prefill", "prefill", "decode"]
        expect(row(page, "queue").locator(".name")).to_contain_text("admission")
        expect(row(page, "decode").locator(".guessed")).to_have_text("5/6")
        boxes = [row(page, name).locator(".bar").bounding_box() for name in ("queue", "decode")]
        assert boxes[0] is not None
        assert boxes[1] is not None
        assert boxes[1]["width"] == pytest.approx(3 * boxes[0]["width"], rel=0.05)
        assert boxes[1]["x"] > boxes[0]["x"] + boxes[0]["width"]


def test_overlapping_phases_are_told_as_at_the_terminal(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(a_line(*overlapping_spans()))
    spans = [read.span for read in read_spans(path.read_bytes())]
    with opened(browser, path) as one:
        choose(one.page, "POST /v1/x")
        legend = one.page.get_by_role("list", name="Where its time went").inner_text()
        told = [line.rsplit(" ", 4)[0] for line in legend.split("\n")]
        assert told == list(time_by_phase(spans))
        assert "outside these 1.50 s" in legend


def test_an_engine_window_shows_what_each_step_gave_each_request(
    browser: Browser, played: Path
) -> None:
    with opened(browser, played) as one:
        page = one.page
        choose(page, "engine.window")
        assert names(page) == ["engine.window"] + ["engine.step"] * 4
        step = row(page, "#1 decode")
        expect(step.locator(".guessed")).to_have_text("2/5")
        chips = step.locator(".chip")
        assert [chip.get_attribute("title") for chip in chips.all()] == [
            "req-0: 2 of 3 guesses accepted",
            "req-1: 0 of 2 guesses accepted",
        ]
        assert [chips.nth(0).locator(kind).count() for kind in (".yes", ".no")] == [2, 1]
        phases = step.locator(".bar .part")
        assert [phases.nth(idx).get_attribute("title").split()[0] for idx in range(5)] == [
            *("plan", "draft", "target_forward", "verify", "commit")
        ]
        step.locator(".words").click()
        table = step.get_by_role("table")
        assert [cell.split("\t") for cell in table.inner_text().split("\n")[1:]] == [
            ["req-0", "1", "ngram", "3", "2", "0.00", "3", "–"],
            ["req-1", "1", "suffix", "2", "0", "0.00", "1", "–"],
        ]
        expect(step.locator(".details")).to_contain_text("specserve.batch.token_budget")
        failed = row(page, "#3")
        expect(failed.locator(".failed")).to_have_text("failed")
        failed.locator(".words").click()
        expect(failed.locator(".details .failure")).to_have_text("Failed: out of memory")
        expect(page.locator("#results .failed")).to_have_text("1 failed")
        page.get_by_label("Find in this trace").fill("suffix")
        expect(page.locator("#marked")).to_have_text("2 of 25 spans")
        expect(page.locator(".span.marked")).to_have_count(2)


def test_everything_can_be_done_by_keyboard(browser: Browser, played: Path) -> None:
    with opened(browser, played) as one:
        page = one.page
        page.keyboard.press("/")
        assert page.evaluate(FOCUSED) == "tags"
        page.keyboard.type("specserve.step.kind=decode")
        page.keyboard.press("Enter")
        expect(page.locator("#results li")).to_have_count(1)
        page.keyboard.press("Escape")
        page.keyboard.press("j")
        expect(page.locator("#trace")).to_be_visible()
        page.keyboard.press("0")  # leads into the rows
        assert page.evaluate(FOCUSED).startswith("engine.window, 40.0 ms")
        for key in ("ArrowDown", "ArrowDown"):
            page.keyboard.press(key)
        assert page.evaluate(FOCUSED) == "engine.step, 10.0 ms at 10.0 ms, 2 of 5 guesses accepted"
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.evaluate(FOCUSED) == "plan, 1.00 ms at 10.0 ms"
        page.keyboard.press("z")
        expect(page.locator("#ticks span").first).to_have_text("9.95 ms")
        page.keyboard.press("0")
        expect(page.locator("#ticks span").last).to_have_text("40.0 ms")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Enter")
        expect(row(page, "#1 decode").locator(".details")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator(".details")).to_have_count(0)
        page.keyboard.press("ArrowLeft")
        expect(row(page, "plan")).to_have_count(0)
        page.keyboard.press("e")
        assert len(names(page)) == 1 + 4 * 6
        page.keyboard.press("c")
        assert names(page) == ["engine.window"]
        assert page.locator("#rows [tabindex='0']").count() == 1


def test_a_search_is_by_service_operation_duration_and_tags(browser: Browser, played: Path) -> None:
    with opened(browser, played) as one:
        page = one.page
        results = page.locator("#results li")
        page.get_by_label("Service").select_option("specserve-engine")
        expect(results).to_have_count(1)
        page.get_by_label("Service").select_option("specserve")
        expect(results).to_have_count(2)
        page.get_by_label("Operation").select_option("decode")
        page.get_by_label("Tags").fill("specserve.spec.accepted_tokens=1")
        page.get_by_label("Tags").press("Enter")
        expect(results).to_have_count(1)
        page.get_by_label("At least").fill("2s")
        page.get_by_role("button", name="Find", exact=True).click()
        expect(page.locator("#found")).to_have_text("No trace matches.")
        page.get_by_label("At least").fill("")
        page.get_by_label("Tags").fill("two words")
        page.get_by_label("Tags").press("Enter")
        expect(page.locator("#found")).to_have_text("Tags are key=value: “two words” is not.")


def test_what_the_server_cannot_read_or_find_is_shown(browser: Browser, played: Path) -> None:
    with opened(browser, played, expected="status of 40") as one:
        one.page.get_by_label("At most").fill("5")
        one.page.get_by_label("At most").press("Enter")
        expect(one.page.locator("#found")).to_contain_text("'5' is not a duration such as 1.5ms")
        one.page.goto(f"{one.origin}/#trace=abc")
        expect(one.page.locator("#trace-title")).to_have_text("Trace abc: trace not found")


def test_links_lead_from_a_request_to_its_steps_and_back(browser: Browser, played: Path) -> None:
    with opened(browser, played) as one:
        page = one.page
        page.goto(f"{one.origin}/#trace={trace_id(0)}")
        row(page, "decode").locator(".words").click()
        links = row(page, "decode").locator(".links a")
        expect(links).to_have_count(4)
        expect(links.nth(0)).to_have_text("engine.window #0, 40.0 ms")
        expect(links.nth(2)).to_have_text("engine.step #1, 10.0 ms: 2 of 3 accepted, 3 tokens")
        links.nth(2).click()
        expect(row(page, "#1 decode").locator(".details")).to_be_visible()
        expect(row(page, "#1 decode")).to_be_focused()
        expect(page.locator("#results a[aria-current]")).to_contain_text("engine.window")
        back = row(page, "#1 decode").locator(".links a", has_text="req-0")
        expect(back).to_have_text("decode of req-0, 600 ms")
        back.click()
        expect(page.locator("#facts")).to_contain_text("req-0")
        page.go_back()
        expect(page.locator("#trace-title")).to_have_text("engine.window")


def test_a_file_that_grows_is_followed_and_the_open_trace_with_it(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(a_line(a_span(1, "first", seconds=2), a_span(2, "part", parent=1)))
    with opened(browser, path) as one:
        page = one.page
        choose(page, "first")
        row(page, "part").locator(".words").click()
        with path.open("ab") as file:
            file.write(a_line(a_span(3, "later", parent=1, start=1)))
            file.write(a_line(a_span(4, "second", trace=2, start=3)))
        expect(page.locator("#results b")).to_have_text(["second", "first"])
        expect(row(page, "later")).to_be_visible()
        expect(row(page, "part").locator(".details")).to_be_visible()  # as it was left
        page.get_by_label("Follow the file").uncheck()
        with path.open("ab") as file:
            file.write(a_line(a_span(5, "third", trace=3, start=4)))
        expect(page.locator("#status")).to_contain_text("3 traces")
        expect(page.locator("#results li")).to_have_count(2)


def test_what_a_file_says_is_text_and_never_markup(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    hostile = a_span(1, HOSTILE, error=HOSTILE, **{HOSTILE: HOSTILE})
    path.write_bytes(a_line(hostile, service=HOSTILE))
    with opened(browser, path) as one:
        page = one.page
        choose(page, HOSTILE)
        assert names(page) == [HOSTILE]
        row(page, "img").locator(".words").click()
        expect(page.locator(".details .attributes dd").first).to_have_text(HOSTILE)
        assert page.locator("img, script:not([src])").count() == 0


def test_a_viewer_that_ended_is_said(browser: Browser, played: Path) -> None:
    with browser.new_context() as context, ExitStack() as stack:
        page = context.new_page()
        viewer = stack.enter_context(a_viewer_in_a_thread(played))
        page.goto(f"http://127.0.0.1:{viewer.port}/")
        expect(page.locator("#results li")).to_have_count(3)
        stack.close()
        expect(page.locator("#status")).to_contain_text("is it still running?")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_small_window_in_light_and_dark(
    browser: Browser, played: Path, scheme: str
) -> None:
    small = {"width": 420, "height": 800}
    with opened(browser, played, viewport=small, color_scheme=scheme) as one:
        page = one.page
        choose(page, "engine.window")
        row(page, "#1 decode").locator(".words").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= 420
        shade = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)"
        assert all((part > 128) == (scheme == "light") for part in page.evaluate(shade))
