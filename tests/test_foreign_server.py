"""The load generator against another engine: llama.cpp's server, and what that server says itself.

    specserve loadgen peers --install
    python -m pytest -m slow -s tests/test_foreign_server.py

Both clocks see the same spans, so they agree however busy the machine is.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve_loadgen.peers_install import default_cache
from specserve_loadgen.peers_servers import MODEL_NAME, Running, Server
from specserve_loadgen.prompt import Prompt
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.render import render
from specserve_loadgen.report import Report, make_report
from specserve_loadgen.run import run_load
from specserve_loadgen.settings import ClosedLoop, Settings, Synthetic
from specserve_loadgen.synthetic import synthetic_prompts

LLAMA = default_cache() / "llamacpp"
BINARY = LLAMA / "build" / "bin" / "llama-server"
MODEL = LLAMA / "models" / "Q8_0.gguf"
TOLERANCE = 0.03

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (BINARY.is_file() and MODEL.is_file()),
        reason="llama.cpp's server is not installed: specserve loadgen peers --install",
    ),
]


def llama_server(*flags: str) -> Server:
    return Server(
        name="llama.cpp",
        peer="llamacpp",
        version="installed",
        precision="int8",
        speculation="on",
        argv=(
            *(str(BINARY), "-m", str(MODEL), "--alias", MODEL_NAME, "--host", "127.0.0.1"),
            *("--port", "{port}", "-t", "2", "-tb", "2", "-np", "2", "-c", "4096", "--metrics"),
            *("--no-cache-prompt", "--cache-ram", "0", "--no-ui", *flags),
        ),
    )


async def measured(url: str, prompts: list[Prompt], users: int, max_tokens: int) -> Report:
    settings = Settings(
        url=url,
        load=ClosedLoop(users),
        num_requests=len(prompts),
        max_tokens=max_tokens,
        temperature=0.0,
        ignore_eos=True,
    )
    report = make_report(settings, await run_load(settings, prompts))
    print(render(report))
    assert report.engine == "llama.cpp"
    assert report.num_succeeded == len(prompts)
    assert report.cross_check.disagreements == ()
    return report


async def test_its_tokens_guesses_and_times_are_what_it_says_itself(tmp_path: Path) -> None:
    ngram = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3")
    server = llama_server(*ngram, "--spec-ngram-simple-size-m", "8")
    async with Running(server, tmp_path / "log", start_seconds=60.0) as running:
        together = await measured(running.url, load_prompts(None, ["repetition"])[:4], 2, 40)
        # Its prompt_ms leaves out the wait for the other user's step: so one user.
        long = synthetic_prompts(Synthetic(input_tokens="300"), 3, seed=1)
        alone = await measured(running.url, long, 1, 2)
    counts = {c.name: (c.replies, c.server) for c in together.cross_check.counts}
    assert counts["output tokens"] == (4 * 40, 4 * 40)
    for name in ("draft tokens", "steps with drafts", "accepted draft tokens"):
        ours, its = counts[name]
        assert ours == its
        assert ours
    decode = together.cross_check.times[1]
    assert decode.client_seconds == pytest.approx(decode.server_seconds, rel=TOLERANCE)
    prompt = alone.cross_check.times[0]
    assert prompt.client_seconds == pytest.approx(prompt.server_seconds, rel=TOLERANCE)
