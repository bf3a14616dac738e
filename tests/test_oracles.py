"""Load tools of others against our server, unchanged, and our report of the same requests.

    python -m tests.test_oracles                      # installs both, once (2 GB, minutes)
    python -m pytest -m slow -s tests/test_oracles.py # wants a machine on which nothing else runs

Each lives in an environment of its own, below the cache folder: guidellm needs a torch of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specserve_loadgen.peers_install import default_cache
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.render import render
from specserve_loadgen.report import Report
from tests.load_tap import tapping
from tests.test_demo_server import start

CACHE = default_cache().parent / "oracles"
PACKAGES = {"aiperf": ("aiperf==0.13.0",), "guidellm": ("guidellm==0.8.1", "torch==2.13.0")}
NUM_REQUESTS, NUM_USERS, NUM_TOKENS = 12, 2, 48
TOLERANCE = 0.02
PATIENCE = 170.0  # seconds


def program(name: str) -> Path:
    return CACHE / name / "bin" / name


def needs(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not program(name).is_file(),
        reason=f"{name} is not installed: python -m tests.test_oracles",
    )


pytestmark = [pytest.mark.slow, pytest.mark.demo, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def url(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    running = start(tmp_path_factory.mktemp("serve"), "--drafters", "ngram")
    yield running.url
    running.process.terminate()
    running.process.communicate()


def write_prompts(path: Path, key: str, categories: list[str], more: dict[str, object]) -> None:
    """Long ones: a tool's way to the tap, which the tap cannot see, takes about 3 ms of TTFT."""
    texts = [p.messages[0].content for p in load_prompts(None, categories)]
    rows = [{key: "\n\n".join((texts * 2)[idx : idx + 6]), **more} for idx in range(len(texts))]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


async def run_tool(*argv: str, log: Path, **environment: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *argv, env={**clean, **environment}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            async with asyncio.timeout(PATIENCE):
                status = await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert status == 0, f"{argv[0]} ended with {status}, it says in {log}"


def compare(rows: list[tuple[str, float, float]]) -> None:
    """rows: what, ours, theirs"""
    for name, ours, theirs in rows:
        print(f"{name:28} ours {ours:10.4f}  theirs {theirs:10.4f}  ratio {theirs / ours:.4f}")
    for name, ours, theirs in rows:
        assert theirs == pytest.approx(ours, rel=TOLERANCE), name


def known(report: Report) -> tuple[float, float, float]:
    """(mean TTFT, mean E2E, output tokens/s)"""
    latency, speed = report.latency, report.throughput.output_tokens_per_second
    assert latency.ttft is not None
    assert latency.e2e is not None
    assert speed is not None
    return latency.ttft.mean, latency.e2e.mean, speed


@needs("aiperf")
async def test_aiperf_measures_what_we_measure(
    url: str, demo_model_dir: Path, tmp_path: Path
) -> None:
    write_prompts(tmp_path / "prompts.jsonl", "text", ["edit", "summarise"], {})
    async with tapping(url) as (tap, address):
        await run_tool(
            *(str(program("aiperf")), "profile", "-m", "demo", "--url", address, "--ui", "none"),
            *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
            *("--concurrency", str(NUM_USERS), "--request-count", str(NUM_REQUESTS)),
            *("--input-file", str(tmp_path / "prompts.jsonl")),
            *("--custom-dataset-type", "single_turn", "--tokenizer", str(demo_model_dir)),
            *("--extra-inputs", f"max_completion_tokens:{NUM_TOKENS}"),
            *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0"),
            *("--output-artifact-dir", str(tmp_path / "aiperf")),
            log=tmp_path / "log",
        )
    report = tap.report()
    print(render(report))
    theirs: dict[str, Any] = json.loads(
        (tmp_path / "aiperf" / "profile_export_aiperf.json").read_text()
    )
    assert theirs["request_count"]["avg"] == NUM_REQUESTS == report.num_succeeded
    ttft, e2e, speed = known(report)
    pooled = report.acceptance
    assert report.latency.tpot is not None
    acceptance_length = pooled.mean_acceptance_length_per_request
    assert acceptance_length is not None
    compare(
        [
            ("TTFT ms", ttft * 1e3, theirs["time_to_first_token"]["avg"]),
            ("E2E ms", e2e * 1e3, theirs["request_latency"]["avg"]),
            ("TPOT ms", report.latency.tpot.mean * 1e3, theirs["inter_token_latency"]["avg"]),
            ("output tokens/s", speed, theirs["output_token_throughput"]["avg"]),
            ("steps with drafts", pooled.num_spec_steps, theirs["total_spec_decode_steps"]["avg"]),
            ("draft tokens", pooled.num_draft_tokens, theirs["total_draft_tokens"]["avg"]),
            (
                "accepted draft tokens",
                pooled.num_accepted_draft_tokens,
                theirs["total_accepted_draft_tokens"]["avg"],
            ),
            (
                "mean acceptance length",
                acceptance_length,
                theirs["spec_decode_acceptance_length"]["avg"],
            ),
        ]
    )


@needs("guidellm")
async def test_guidellm_measures_what_we_measure(
    url: str, demo_model_dir: Path, tmp_path: Path
) -> None:
    """It leaves out what was under way when its count was reached: only its own are compared."""
    # Other ones than aiperf's: what lies in the prefix cache has no TTFT to speak of.
    limit: dict[str, object] = {"output_tokens_count": NUM_TOKENS}
    write_prompts(tmp_path / "prompts.jsonl", "prompt", ["extraction", "code"], limit)
    out = tmp_path / "guidellm.json"
    async with tapping(url) as (tap, address):
        await run_tool(
            *(str(program("guidellm")), "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={address},model=demo"),
            *("--tokenizer", f"kind=huggingface_auto,model={demo_model_dir}"),
            *("--data", f"kind=json_file,path={tmp_path / 'prompts.jsonl'}"),
            *("--profile", f"kind=concurrent,streams={NUM_USERS}"),
            *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
            *("--output", f"kind=json,path={out}"),
            log=tmp_path / "log",
            HF_HUB_OFFLINE="1",
        )
    (benchmark,) = json.loads(out.read_text())["benchmarks"]
    theirs = benchmark["requests"]["successful"]
    assert len(theirs) >= NUM_REQUESTS - NUM_USERS
    report = tap.report([request["response_id"] for request in theirs])
    print(render(report))
    ttft, e2e, speed = known(report)
    seconds = max(r["request_end_time"] for r in theirs) - min(
        r["request_start_time"] for r in theirs
    )

    def mean(name: str) -> float:
        return sum(float(request[name]) for request in theirs) / len(theirs)

    assert report.latency.tpot is not None
    compare(
        [
            ("TTFT ms", ttft * 1e3, mean("time_to_first_token_ms")),
            ("E2E ms", e2e * 1e3, mean("request_latency") * 1e3),
            ("TPOT ms", report.latency.tpot.mean * 1e3, mean("inter_token_latency_ms")),
            ("output tokens/s", speed, sum(r["output_tokens"] for r in theirs) / seconds),
        ]
    )


def install() -> None:
    for name, packages in PACKAGES.items():
        subprocess.run([sys.executable, "-m", "venv", CACHE / name], check=True)
        pip = CACHE / name / "bin" / "pip"
        subprocess.run([pip, "install", "--quiet", *packages], check=True)
        print(f"{name}: {program(name)}")


if __name__ == "__main__":
    install()
