"""`specserve trace serve`: the command, what it serves beside the API, and whom it answers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from specserve.cli import main
from specserve_observability import trace_viewer
from tests.otlp_lines import a_line, a_span, odd_lines
from tests.trace_viewing import a_viewer

pytestmark = pytest.mark.timeout(60)

GOLDEN = Path(__file__).parent / "golden" / "trace.jsonl"
PAGES = [path.name for path in (Path(trace_viewer.__file__).parent / "viewer").iterdir()]
REFERENCE = re.compile(r"""(?:src|href|from|import)\s*=?\s*\(?["']([^"'#$]+)["']""")


def test_the_command_serves_a_file_until_it_is_told_to_end() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "specserve", "trace", "serve", str(GOLDEN), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        [url] = re.findall(r"http://127\.0\.0\.1:\d+/", said)
        with urllib.request.urlopen(f"{url}api/v3/services", timeout=30) as reply:
            assert json.load(reply).keys() == {"services"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_what_cannot_be_served_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"data": []}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for arguments, said in (
            ([tmp_path / "absent"], "No such file or directory"),
            ([wrong], "its first line is not OTLP JSON"),
            ([GOLDEN, "--port", port], f"cannot listen on 127.0.0.1:{port}"),
        ):
            assert main(["trace", "serve", *map(str, arguments)]) == 1
            captured = capsys.readouterr()
            assert captured.out == ""
            assert said in captured.err


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--port", "70000", "'70000' is not a port: give 0 to 65535"),
        ("--memory-mb", "0", "'0' is not a number of megabytes: give 1 or more"),
    ],
)
def test_a_value_out_of_range_is_named(
    flag: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", "serve", str(GOLDEN), flag, value])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


async def test_a_file_is_followed_while_it_grows_and_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.touch()
    async with a_viewer(path) as viewer:
        counts = []
        for number in range(1, 5):
            with path.open("ab") as file:
                file.write(a_line(a_span(number, trace=number)))
            if number % 2:
                os.replace(path, tmp_path / f"t.jsonl.{number}")
                path.touch()
            viewer.reader.read()
            counts.append((await viewer.get("/viewer/status")).body["traces"])
        assert counts == [1, 2, 3, 4]


async def test_a_folder_that_goes_away_is_said_and_read_again_when_it_is_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, away = tmp_path / "here", tmp_path / "away"
    folder.mkdir()
    path = folder / "t.jsonl"
    path.write_bytes(a_line(a_span(1)))
    async with a_viewer(path, GOLDEN) as viewer:
        folder.rename(away)
        viewer.reader.read()
        viewer.reader.read()
        assert capsys.readouterr().err.count(f"{path}: cannot be read now") == 1
        away.rename(folder)
        with path.open("ab") as file:
            file.write(a_line(a_span(2, trace=2)))
        viewer.reader.read()
        assert viewer.store.num_spans == 5


async def test_lines_that_are_none_are_counted_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(a_line(a_span(1)) + b"oops\n\n" + b"{}\n" * 20 + a_line(a_span(2)))
    with path.open("ab") as file:
        file.writelines(odd_lines())
    async with a_viewer(path, GOLDEN) as viewer:
        status = (await viewer.get("/viewer/status")).body
    assert status["badLines"] == 27
    assert status["spans"] == 5
    assert status["files"] == [str(path), str(GOLDEN)]
    said = capsys.readouterr().err
    assert f"{path}: left out a line that is not OTLP JSON" in said
    assert said.count("left out") == 5


async def test_every_file_of_the_page_has_its_type_and_a_strict_policy() -> None:
    types = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
    named = set()
    async with a_viewer(GOLDEN) as viewer:
        for name in PAGES:
            reply = await viewer.get("/" if name == "index.html" else f"/viewer/{name}")
            assert reply.status == 200
            assert reply.headers["content-type"] == f"{types[name.split('.')[1]]}; charset=utf-8"
            assert reply.headers["x-content-type-options"] == "nosniff"
            policy = reply.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert not re.findall(r"(?:https?:)?//[a-z][a-z0-9-]*\.[a-z]", reply.text), name
            assert not re.search(r"innerHTML|outerHTML|document\.write|\beval\b", reply.text)
            named |= {found.split("/")[-1] for found in REFERENCE.findall(reply.text)}
    assert {name for name in named if "." in name} == set(PAGES) - {"index.html"}


async def test_a_link_to_jaegers_page_of_a_trace_leads_to_ours() -> None:
    async with a_viewer(GOLDEN) as viewer:
        reply = await viewer.get("/trace/5b8efff798038103d269b633813fc60c")
        assert reply.status == 302
        assert reply.headers["location"] == "/#trace=5b8efff798038103d269b633813fc60c"
        assert (await viewer.get("/trace/<script>")).status == 404


async def test_a_page_that_gave_its_name_this_address_reads_nothing() -> None:
    async with a_viewer(GOLDEN) as viewer:
        for host in ("evil.example", "evil.example:16686", "localhost.evil.example"):
            reply = await viewer.get("/api/v3/services", Host=host)
            assert reply.status == 403
            assert "specserve-engine" not in reply.text
        for host in ("localhost:16686", "127.0.0.1", "[::1]:80"):
            assert (await viewer.get("/api/v3/services", Host=host)).status == 200


async def test_a_name_given_as_host_is_answered_and_no_other() -> None:
    for host in ("0.0.0.0", "Traces.example"):
        async with a_viewer(GOLDEN, host=host) as viewer:
            assert (await viewer.get("/api/v3/services", Host="evil.example")).status == 403
            named = await viewer.get("/api/v3/services", Host="traces.example:16686")
            assert named.status == (403 if host == "0.0.0.0" else 200)


async def test_a_page_of_another_site_cannot_have_traces_converted() -> None:
    async with a_viewer(GOLDEN) as viewer:
        for site, status in (("cross-site", 403), ("same-origin", 200)):
            headers = {"Sec-Fetch-Site": site}
            reply = await viewer.post("/api/transform", a_line(a_span(1)), **headers)
            assert reply.status == status


async def test_nothing_allows_other_pages_to_read_it() -> None:
    async with a_viewer(GOLDEN) as viewer:
        reply = await viewer.get("/api/v3/services", Origin="http://evil.example")
        assert not [name for name in reply.headers if name.startswith("access-control")]
