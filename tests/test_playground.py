"""The playground in a real browser: what a person sees and can do, by mouse and by keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

pytest.importorskip("playwright", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, Route, expect

from specserve.server.keys import KeyRing
from specserve.server.state import ServerSettings
from tests.browser import Visit, a_browser, served, visit
from tests.http_server import Pace
from tests.scripted import BROKEN, says

pytestmark = pytest.mark.timeout(300)
expect.set_options(timeout=30_000)

TEXT = "abcdefgh"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>&amp;"
FAST = ServerSettings(event_seconds=0.02, idle_event_seconds=0.1)
FOCUSED = "document.activeElement.id || document.activeElement.name"
KEY = "k-0123456789abcdef"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with a_browser() as one:
        yield one


def set_up(page: Page, drafter: str = "part", k: int = 3, *, mode: str = "on") -> None:
    """Settings as a person makes them. The page must have learned what the server offers."""
    expect(page.locator("#model")).to_have_text("test")
    expect(page.locator("#drafter option").first).to_be_attached()
    if not page.get_by_label("Temperature").is_visible():
        page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Drafter").select_option(drafter)
    page.get_by_label("Guesses per step").fill(str(k))
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Most tokens").fill("120")
    page.get_by_role("radio", name=mode).check()


def send(page: Page, text: str = "say") -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")


def reads(page: Page, text: str) -> None:
    """The reply as it is seen: what is hidden does not count."""
    expect(page.locator(".reply .text")).to_have_text(text, use_inner_text=True)


def finished(page: Page, num_replies: int = 1) -> None:
    """So many replies have come to their own end."""
    expect(page.locator(".reply[aria-busy=false]")).to_have_count(num_replies)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    expect(page.get_by_role("alert")).to_have_count(0)


def texts(page: Page, kind: str) -> list[str]:
    return page.locator(f".reply .token.{kind}").all_text_contents()


def colour(page: Page, kind: str) -> str:
    found: str = page.locator(f".reply .token.{kind}").first.evaluate(
        "element => getComputedStyle(element).backgroundColor"
    )
    return found


def test_a_reply_streams_and_each_token_has_the_colour_of_its_origin(browser: Browser) -> None:
    pace = Pace()
    with (
        served(says(TEXT), on_forward=pace, settings=FAST) as server,
        visit(browser, server) as one,
    ):
        page = one.page
        set_up(page)
        send(page)
        pace.allow(2)  # the prompt's step and one more: it stands still in the middle
        reads(page, "abcd")
        expect(page.locator(".reply")).to_have_attribute("aria-busy", "true")
        expect(page.get_by_role("button", name="Stop")).to_be_enabled()
        pace.allow(1000)
        finished(page)
        assert texts(page, "plain") == ["a"]
        assert texts(page, "accepted") == ["b", "c", "e", "f", "h", ""]  # "": the end itself
        assert texts(page, "corrected") == ["d", "g"]
        colours = [colour(page, kind) for kind in ("plain", "accepted", "corrected")]
        assert len(set(colours)) == 3
        facts = page.locator(".reply .facts").inner_text()
        assert "6 of 9 (67 %)" in facts
        assert re.search(r"Tokens\s+9\b", facts)
        label = page.locator(".reply .charts svg").last.get_attribute("aria-label")
        assert label == "position 1: 3 of 3, position 2: 3 of 3, position 3: 0 of 3"
        assert one.bodies[0]["speculation"] == {"drafter": "part", "max_draft_tokens": 3}


def test_guesses_that_are_all_right_end_in_a_bonus(browser: Browser) -> None:
    with served(says(TEXT)) as server, visit(browser, server) as one:
        set_up(one.page, "oracle", 2)
        send(one.page)
        finished(one.page)
        assert texts(one.page, "bonus") == ["d", "g"]


def test_a_token_tells_what_it_is_by_mouse_and_by_keyboard(browser: Browser) -> None:
    with served(says(TEXT)) as server, visit(browser, server) as one:
        page = one.page
        set_up(page)
        send(page)
        finished(page)
        details = page.get_by_role("tooltip")
        expect(details).to_be_hidden()
        page.locator(".reply .token.accepted", has_text="c").hover()
        expect(details).to_contain_text("Accepted: guess 2 of 3 by part.")
        expect(details).to_contain_text("The model gives it")
        expect(details).to_contain_text("Step 2 of this reply")
        page.mouse.move(0, 0)
        expect(details).to_be_hidden()
        # One stop of Tab leads into the reply, arrows lead on.
        page.locator(".reply .token").first.focus()
        expect(details).to_contain_text("Plain: The model’s own token")
        for _ in range(3):
            page.keyboard.press("ArrowRight")
        expect(details).to_contain_text("Corrected: The model’s own token, guess 3 of 3 by part")
        expect(page.locator(":focus")).to_have_attribute("aria-describedby", "details")
        page.keyboard.press("ArrowLeft")
        expect(details).to_contain_text("“c”")
        page.keyboard.press("End")
        expect(details).to_contain_text("no text of its own")
        page.keyboard.press("Escape")
        expect(details).to_be_hidden()
        assert page.locator(".reply [tabindex='0']").count() == 1


def test_rejected_guesses_are_shown_when_asked_for(browser: Browser) -> None:
    with served(says(TEXT)) as server, visit(browser, server) as one:
        page = one.page
        set_up(page)
        send(page)
        finished(page)
        rejected = page.locator(".reply del.rejected")
        expect(rejected).to_have_count(3)
        expect(rejected.first).to_be_hidden()
        page.get_by_label("Show rejected guesses").check()
        expect(rejected.first).to_be_visible()
        assert rejected.all_text_contents()[:2] == ["e", "h"]
        assert page.locator(".reply .text").inner_text().startswith("abcedef")  # c, not e, but d
        rejected.first.hover()
        details = page.get_by_role("tooltip")
        expect(details).to_contain_text("Rejected: guess 3 by part.")
        expect(details).to_contain_text("The model chose “d”.")
        page.get_by_label("Show rejected guesses").uncheck()
        expect(rejected.first).to_be_hidden()


def test_compare_runs_one_seed_both_ways_and_says_that_the_text_is_the_same(
    browser: Browser,
) -> None:
    with served(says(TEXT * 8)) as server, visit(browser, server) as one:
        page = one.page
        set_up(page, "oracle", 4, mode="compare")
        send(page)
        finished(page, 2)
        verdict = page.locator(".verdict")
        expect(verdict).to_contain_text("Identical text, all 65 tokens.")
        expect(verdict).to_contain_text(
            re.compile(r"With speculation \d+\.\d\d times as (fast|slow): .* s against .* s")
        )
        expect(verdict).to_contain_text("14 steps against 65")
        on, off = page.locator(".reply").all()
        assert on.get_by_role("heading", level=3).inner_text().startswith("Speculation on, seed")
        assert off.locator(".token.plain").count() == 65
        first, second = one.bodies
        assert first["speculation"]["drafter"] == "oracle"
        assert second["speculation"] == {"drafter": "none"}
        for name in ("seed", "messages", "temperature", "max_tokens"):
            assert first[name] == second[name]
        assert first["cache_salt"] != second["cache_salt"]
        # Side by side where there is room.
        boxes = [reply.bounding_box() for reply in (on, off)]
        assert boxes[0]
        assert boxes[1]
        assert boxes[0]["y"] == boxes[1]["y"]


def test_compare_says_where_two_texts_differ(browser: Browser) -> None:
    """The control: a reply that was tampered with on its way."""
    with served(says(TEXT)) as server, visit(browser, server) as one:
        page = one.page

        def tamper(route: Route) -> None:
            body = route.request.post_data_json
            if body["speculation"]["drafter"] != "none":
                route.continue_()
                return
            reply = route.fetch()
            route.fulfill(response=reply, body=reply.text().replace('"id":100', '"id":101'))

        page.route("**/v1/chat/completions", tamper)
        set_up(page, mode="compare")
        send(page)
        finished(page, 2)
        expect(page.locator(".verdict.different")).to_have_text("The texts differ from token 4 on.")


def test_a_conversation_goes_on_and_can_be_begun_anew(browser: Browser) -> None:
    with served(says(TEXT)) as server, visit(browser, server) as one:
        page = one.page
        set_up(page)
        send(page, "first")
        finished(page)
        send(page, "second")
        finished(page, 2)
        assert [message["content"] for message in one.bodies[1]["messages"]] == [
            *("first", TEXT, "second")
        ]
        page.get_by_role("button", name="New chat").click()
        expect(page.locator(".turn")).to_have_count(0)
        send(page, "third")
        finished(page)
        assert [message["content"] for message in one.bodies[2]["messages"]] == ["third"]


def test_what_the_server_refuses_is_said_and_can_be_tried_again(browser: Browser) -> None:
    with served(says(TEXT)) as server, visit(browser, server, expected="400") as one:
        page = one.page
        set_up(page)
        page.get_by_label("Most tokens").fill("100000")
        send(page)
        alert = page.get_by_role("alert")
        expect(alert).to_contain_text("maximum context length is 256 tokens")
        page.get_by_label("Most tokens").fill("20")
        page.get_by_role("button", name="Try again").click()
        finished(page)
        reads(page, TEXT)
        expect(alert).to_have_count(0)


def test_a_reply_that_breaks_off_keeps_what_it_said_and_says_why(browser: Browser) -> None:
    with served(says("abc", then=BROKEN)) as server, visit(browser, server) as one:
        page = one.page
        set_up(page, "oracle", 1)
        send(page)
        expect(page.get_by_role("alert")).to_be_visible()
        assert page.get_by_role("alert").inner_text() != ""
        reads(page, "abc")
        expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_a_server_that_is_gone_is_said_and_found_again(browser: Browser) -> None:
    with ExitStack() as visiting:
        with served(says(TEXT), settings=FAST) as server:
            port = server.port
            one = visiting.enter_context(visit(browser, server, expected="net::ERR"))
            page = one.page
            expect(page.get_by_role("status")).to_have_text("live")
            set_up(page)
        expect(page.get_by_role("status")).to_contain_text("trying again")
        send(page)
        expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
        with served(says(TEXT), settings=FAST, port=port):
            expect(page.get_by_role("status")).to_have_text("live")
            page.get_by_role("button", name="Try again").click()
            finished(page)
            reads(page, TEXT)
            visiting.close()  # before the server goes


def test_the_engine_is_shown_while_it_works(browser: Browser) -> None:
    pace = Pace()
    with (
        served(says(TEXT), settings=FAST, on_forward=pace) as server,
        visit(browser, server) as one,
    ):
        page = one.page
        expect(page.get_by_role("status")).to_have_text("live")
        expect(page.locator("#running")).to_have_text("0")
        expect(page.locator("#pool-text")).to_have_text("0 blocks in use, 0 cached, 256 free")
        set_up(page)
        send(page)
        expect(page.locator("#running")).to_have_text("1")
        pace.allow(1000)
        finished(page)
        expect(page.locator("#running")).to_have_text("0")
        expect(page.locator("#drafters")).to_have_text("part: 6 of 9 guesses right (67 %)")
        chart = page.locator("#position-chart svg")
        expect(chart).to_have_attribute(
            "aria-label", "position 1: 3 of 3, position 2: 3 of 3, position 3: 0 of 3"
        )
        expect(page.locator("#phases-text")).to_contain_text("model")


def test_everything_can_be_done_by_keyboard_alone(browser: Browser) -> None:
    with served(says(TEXT)) as server, visit(browser, server) as one:
        page = one.page
        set_up(page)
        page.get_by_label("Message").focus()
        page.keyboard.press("Control+a")
        page.keyboard.type("one")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type("two")
        reached = []
        for _ in range(12):
            page.keyboard.press("Tab")
            reached.append(page.evaluate(FOCUSED))
        assert {"mode", "show-rejected", "send", "clear", "drafter", "k", "key"} <= set(reached)
        page.get_by_role("radio", name="on", exact=True).focus()
        page.keyboard.press("ArrowRight")
        assert page.get_by_role("radio", name="off").is_checked()
        page.keyboard.press("ArrowRight")
        assert page.get_by_role("radio", name="compare").is_checked()
        page.get_by_label("Message").focus()
        page.keyboard.press("Enter")
        finished(page, 2)
        assert one.bodies[0]["messages"][0]["content"] == "one\ntwo"


@pytest.mark.parametrize("by", ["Escape", "Stop"])
def test_a_reply_can_be_stopped_and_the_server_hears_of_it(browser: Browser, by: str) -> None:
    pace = Pace()
    with (
        served(says(TEXT), on_forward=pace, settings=FAST) as server,
        visit(browser, server) as one,
    ):
        page = one.page
        set_up(page)
        send(page)
        pace.allow(2)
        reads(page, "abcd")
        if by == "Stop":
            page.get_by_role("button", name="Stop").click()
        else:
            page.keyboard.press("Escape")
        expect(page.get_by_role("alert")).to_have_text("Stopped.")
        page.wait_for_timeout(1000)  # the server hears of it before the text can end
        pace.allow(10)
        expect(page.locator("#running")).to_have_text("0")
        assert server.recorder.requests[0].finish_reason == "abort"


def test_what_a_model_says_is_text_whatever_it_looks_like(browser: Browser) -> None:
    with served(says(HOSTILE)) as server, visit(browser, server) as one:
        page = one.page
        page.on("dialog", lambda dialog: one.errors.append(dialog.message))
        set_up(page)
        page.get_by_label("Show rejected guesses").check()
        send(page, HOSTILE)
        finished(page)
        shown = page.locator(".reply .token:not(.rejected)").all_text_contents()
        assert "".join(shown) == HOSTILE
        expect(page.locator(".asked")).to_have_text(HOSTILE)
        assert page.locator("main img, main script").count() == 0


def test_a_key_is_asked_for_and_kept_nowhere(browser: Browser) -> None:
    settings = ServerSettings(keys=KeyRing([KEY]), event_seconds=0.02)
    with (
        served(says(TEXT), settings=settings) as server,
        visit(browser, server, expected="401") as one,
    ):
        page = one.page
        expect(page.get_by_label("API key")).to_be_focused()
        page.get_by_label("API key").fill(KEY)
        page.get_by_label("API key").press("Tab")
        expect(page.get_by_role("status")).to_have_text("live")
        set_up(page)
        send(page)
        finished(page)
        reads(page, TEXT)
        assert page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])") == (
            "[{},{}]"
        )
        assert page.context.cookies() == []
        assert not any(KEY in url for url in one.urls)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_reads_well_on_any_screen(browser: Browser, scheme: str, width: int) -> None:
    size = {"width": width, "height": 740}
    with (
        served(says(TEXT * 12)) as server,
        visit(browser, server, color_scheme=scheme, viewport=size) as one,
    ):
        page = one.page
        set_up(page, mode="compare")
        page.get_by_label("Show rejected guesses").check()
        send(page, "w" * 120)
        finished(page, 2)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for kind in ("plain", "accepted", "corrected", "rejected"):
            assert contrast(page, f".reply .token.{kind}") >= 4.5
        for selector in (".quiet", "#send", ".facts dt", ".verdict"):
            assert contrast(page, selector) >= 4.5
        assert_everything_has_a_name(page)


def contrast(page: Page, selector: str) -> float:
    """By WCAG 2: of an element's text on the nearest ground that is painted."""
    found: float = page.locator(selector).first.evaluate(
        """element => {
            const numbers = (text) => text.match(/[0-9.]+/g).map(Number);
            const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
                .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
                .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
            const ink = light(numbers(getComputedStyle(element).color));
            let ground = element;
            while (numbers(getComputedStyle(ground).backgroundColor)[3] === 0) {
                ground = ground.parentElement;
            }
            const back = light(numbers(getComputedStyle(ground).backgroundColor));
            return (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
        }"""
    )
    return found


def assert_everything_has_a_name(page: Page) -> None:
    nameless = page.evaluate(
        """[...document.querySelectorAll('input, select, textarea, button, svg, summary')]
            .filter((one) => !(one.labels?.length || one.getAttribute('aria-label')
                || one.textContent.trim()))
            .map((one) => one.outerHTML)"""
    )
    assert nameless == []
    assert page.locator("html[lang]").count() == 1
    assert page.title() == "specserve playground"


def test_nothing_is_asked_of_anybody_else(browser: Browser) -> None:
    with served(says(TEXT)) as server, visit(browser, server) as one:
        set_up(one.page)
        send(one.page)
        finished(one.page)
        paths = {url.removeprefix(one.origin) for url in one.urls}
        assert {"/", "/playground/app.js", "/v1/chat/completions", "/specserve/events"} <= paths
        assert_only_expected(one)


def assert_only_expected(one: Visit) -> None:
    allowed = re.compile(
        r"/|/playground/[a-z]+\.(js|css)|/v1/(models|chat/completions)|/openapi\.json"
        r"|/specserve/events|data:,"
    )
    paths = [url.removeprefix(one.origin) for url in one.urls]
    assert all(allowed.fullmatch(path) for path in paths), paths
