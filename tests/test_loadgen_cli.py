"""`specserve loadgen` as a command: what it prints, writes and returns."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from specserve_loadgen.cli import main
from specserve_loadgen.render import render
from specserve_loadgen.report import Report, to_json
from tests.loadgen_server import Script, ScriptedServer, Step, app_with, serving, write_stream

SPEC = Script(steps=(Step(), Step(drafted=3, accepted=2), Step(drafted=3, accepted=3)))


async def test_the_json_report_holds_settings_numbers_and_requests_but_no_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    async with serving(ScriptedServer([SPEC]).app()) as url:
        options = f"--url {url} --num-requests 3 --json {file} --api-key secret --concurrency 2"
        code = await asyncio.to_thread(main, options.split())
        assert code == 0
    text = file.read_text()
    assert "secret" not in text
    report = json.loads(text)
    assert report["schema"] == "specserve.loadgen/1"
    assert report["settings"]["load"] == {"kind": "closed", "concurrency": 2, "ramp": 0.0}
    assert report["acceptance"]["mean_acceptance_length"] == 3.5
    assert [len(request["chunks"]) for request in report["requests"]] == [3, 3, 3]
    again = msgspec.json.decode(text, type=Report)
    assert json.loads(to_json(again)) == report
    assert render(again) in capsys.readouterr().out


async def test_failures_are_counted_by_kind_and_give_exit_code_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_hits = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_hits
        num_hits += 1
        if num_hits % 2:
            return web.json_response(
                {"error": {"message": "full"}}, status=429, headers={"Retry-After": "3"}
            )
        return await write_stream(request, b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')

    async with serving(app_with(complete)) as url:
        options = f"--url {url} --num-requests 6 --no-progress"
        code = await asyncio.to_thread(main, options.split())
        assert code == 1
    out = capsys.readouterr().out
    assert "6 requests in" in out
    assert "3 succeeded, 3 failed" in out
    assert "http_429: full (Retry-After: 3)" in out


async def test_a_run_without_a_success_shows_its_errors_and_claims_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    async def complete(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no such drafter"}}, status=400)

    async with serving(app_with(complete)) as url:
        code = await asyncio.to_thread(main, ["--url", url, "--num-requests", "2"])
        assert code == 1
    out = capsys.readouterr().out
    assert "http_400: no such drafter" in out
    assert "agree" not in out
    assert "throughput" not in out


async def test_ctrl_c_prints_what_was_measured(tmp_path: Path) -> None:
    third_arrived = asyncio.Event()
    num_hits = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_hits
        num_hits += 1
        if num_hits == 3:
            third_arrived.set()
            await asyncio.Event().wait()
        return await write_stream(request, b'data: {"choices":[{"text":"a"}]}\n\ndata: [DONE]\n\n')

    file = tmp_path / "partial.json"
    async with serving(app_with(complete)) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "specserve_loadgen", "--url", url, "--json", str(file)),
            stdout=subprocess.PIPE,
        )
        await third_arrived.wait()
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    assert process.returncode == 130
    assert b"2 succeeded, 0 failed, stopped early (1 cut off)" in out
    report = json.loads(file.read_text())
    assert (report["interrupted"], report["num_stopped"]) == (True, 1)


async def test_a_run_whose_every_warm_up_fails_does_not_start(
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_hits = 0

    async def complete(request: web.Request) -> web.StreamResponse:
        nonlocal num_hits
        num_hits += 1
        return web.json_response({"error": {"message": "no such drafter"}}, status=400)

    async with serving(app_with(complete)) as url:
        code = await asyncio.to_thread(main, ["--url", url, "--warmup", "2"])
        assert code == 2
    assert "every one of 2 warm-up requests failed, first http_400: no such drafter" in (
        capsys.readouterr().err
    )
    assert num_hits == 2


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [(401, {"error": "who?"}, "who?: give --api-key"), (404, {}, "lists no model: give --model")],
)
async def test_a_server_that_names_no_model_is_explained(
    status: int, body: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def models(request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with serving(app) as url:
        code = await asyncio.to_thread(main, ["--url", url])
        assert code == 2
    assert words in capsys.readouterr().err


# ---- options and exit codes --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--rate 0", "0 is not a number above 0"),
        ("--rate nan", "nan is not a number above 0"),
        ("--rate fast", "'fast' is not a number above 0"),
        ("--concurrency 0", "0 is not a whole number of at least 1"),
        ("--concurrency 1.5", "'1.5' is not a whole number"),
        ("--concurrency 2 --rate 3", "not allowed with"),
        ("--num-requests 2 --duration 3", "not allowed with"),
        ("--temperature -1", "-1 is not a number of at least 0"),
        ("--endpoint embeddings", "invalid choice"),
        ("--prompts /no/such/file.jsonl", "/no/such/file.jsonl: No such file"),
        ("--categories poetry", "--categories poetry: not in the shipped prompt pack, which has"),
        ("--url localhost:8000", "--url localhost:8000: not an address such as"),
        ("--url http://127.0.0.1:99999", "not an address such as"),
        ("--url http://127.0.0.1:1", "no server answers there (Connection refused)"),
        ("--json /no/such/folder/x.json", "its folder does not exist"),
    ],
)
def test_what_cannot_start_says_why_and_gives_exit_code_2(
    options: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(options.split())
    assert code == 2
    assert words in capsys.readouterr().err


def test_help_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--help"])
    assert code == 0
    assert "--concurrency" in capsys.readouterr().out


def test_it_imports_nothing_of_the_servers() -> None:
    code = (
        "import sys, specserve_loadgen.cli\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "ours = {n for n in names if n.startswith('specserve')} - {'specserve_loadgen'}\n"
        "print(sorted(ours | names & {'torch', 'transformers'}))\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code]) == b"[]\n"
