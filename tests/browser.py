"""A real browser on a real server: Chromium without a window, and the server in a thread."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any  # decoded JSON

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

from specserve.server.state import ServerSettings
from tests.http_server import Server, a_server
from tests.scripted import Script

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Where this is set, a machine without a browser fails the tests instead of skipping them.
REQUIRED = "SPECSERVE_REQUIRE_BROWSER"
ARGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
]


def browser_path() -> str:
    """The browser's program; skips where there is none."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        if os.environ.get(REQUIRED):
            pytest.fail(f"{REQUIRED} is set, but none of {', '.join(NAMES)} is installed")
        pytest.skip("no Chromium is installed")
    return found


@contextmanager
def a_browser() -> Iterator[Browser]:
    path = browser_path()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def served(
    script: Script,
    *,
    settings: ServerSettings | None = None,
    on_forward: Callable[[], None] = lambda: None,
    port: int = 0,
) -> Iterator[Server]:
    """A server in a thread of its own; its errors are raised here. Where the page left a reply, the
    server has until the end of the drain to notice."""
    started, stop = threading.Event(), threading.Event()
    found: list[Server] = []
    failed: list[BaseException] = []

    async def serve() -> None:
        async with a_server(script, settings=settings, on_forward=on_forward, port=port) as server:
            found.append(server)
            started.set()
            while not stop.is_set():
                await asyncio.sleep(0.01)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            failed.append(error)
        finally:
            started.set()

    thread = threading.Thread(target=run, name="served")
    thread.start()
    started.wait(30)
    try:
        if found:
            yield found[0]
    finally:
        stop.set()
        thread.join(60)
    for error in failed:
        raise error
    assert not thread.is_alive()


class Visit:
    """One page, and what a good page never does: errors, and requests to somebody else."""

    def __init__(self, page: Page, port: int) -> None:
        self.page = page
        self.origin = f"http://127.0.0.1:{port}"
        self.errors: list[str] = []
        self.urls: list[str] = []
        self.bodies: list[Any] = []
        page.on("console", lambda said: said.type == "error" and self.errors.append(said.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", self._note)

    def _note(self, request: Request) -> None:
        self.urls.append(request.url)
        if request.url.endswith("/v1/chat/completions"):
            self.bodies.append(request.post_data_json)

    def check(self, *, expected: str | None = None) -> None:
        """expected: what every console error holds, where some are meant to be"""
        assert all(expected and expected in error for error in self.errors), self.errors
        assert all(url.startswith((f"{self.origin}/", "data:")) for url in self.urls), self.urls


@contextmanager
def visit(
    browser: Browser, server: Server, *, expected: str | None = None, **context: Any
) -> Iterator[Visit]:
    """A fresh profile on the server's playground. context: as Browser.new_context takes it"""
    with browser.new_context(**context) as fresh:
        page = fresh.new_page()
        page.set_default_timeout(30_000)
        one = Visit(page, server.port)
        page.goto(f"{one.origin}/")
        yield one
        one.check(expected=expected)
