"""The playground's files as they are served; what they do in a browser is another file's matter."""

from __future__ import annotations

import re

import pytest

from specserve.server.keys import KeyRing
from specserve.server.playground import PAGES
from specserve.server.state import ServerSettings
from tests.http_server import a_server
from tests.raw_http import connect
from tests.scripted import says

pytestmark = pytest.mark.timeout(60)

KEYED = ServerSettings(keys=KeyRing(["k-0123456789abcdef"]))
SVG = "http://www.w3.org/2000/svg"  # the name of a language; nobody fetches it
REFERENCE = re.compile(r"""(?:src|href|from|import)\s*=?\s*\(?["']([^"']+)["']""")


async def test_every_file_is_served_without_a_key_with_its_type_and_a_strict_policy() -> None:
    types = {"/": "text/html", "css": "text/css", ".js": "text/javascript"}
    async with a_server(says("a"), settings=KEYED) as server:
        for path in PAGES:
            reply = await server.get(path)
            assert reply.status == 200
            assert reply.headers["content-type"] == f"{types[path[-3:]]}; charset=utf-8"
            assert reply.headers["x-content-type-options"] == "nosniff"
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert not re.search(r"https?:|\*", policy)


async def test_what_the_files_name_is_served_here_and_nothing_comes_from_elsewhere() -> None:
    named = set()
    async with a_server(says("a")) as server:
        for path in PAGES:
            text = (await server.get(path)).body.decode().replace(SVG, "")
            assert not re.findall(r"(?:https?:)?//[a-z][a-z0-9-]*\.[a-z]", text), path
            assert not re.search(r"innerHTML|outerHTML|document\.write|\beval\b|\bon[a-z]+=", text)
            found = {name.replace("./", "/playground/") for name in REFERENCE.findall(text)}
            named |= {name for name in found if not name.startswith("data:")}
    assert "/playground/app.js" in named
    assert named == set(PAGES) - {"/"}


async def test_the_page_is_found_by_head_and_other_methods_and_files_are_not() -> None:
    async with a_server(says("a")) as server, connect(server.port) as one:
        await one.request("HEAD", "/", headers={"connection": "close"})
        status, headers = await one.read_head()
        assert (status, int(headers["content-length"]) > 1000) == (200, True)
        assert (await server.post("/", {})).status == 405
        for path in ("/playground/", "/playground/nothing.js", "/playground/../keys.py"):
            assert (await server.get(path)).status == 404
