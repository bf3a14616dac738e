"""`specserve serve` in a process of its own, where a scripted model stands for a loaded one.

Signals, metrics, traces, the loop and the sockets are the real ones; so its memory, open files and
tasks can be watched from outside while it is attacked. Run as a module it is that process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from pathlib import Path

import msgspec
from aiohttp import web

from specserve import serve
from specserve.compose import Built
from specserve.config import EngineConfig
from specserve.drafting import Drafter
from specserve.engine import Recorder
from specserve.memory import MIB, MemoryReport
from specserve.options import ServeOptions
from specserve_drafts import DRAFTERS, DrafterResources
from specserve_observability.metrics import WAIT_REASONS
from tests.guessers import failing
from tests.http_server import an_engine
from tests.raw_http import ask
from tests.scripted import (
    BROKEN,
    TOOL_TEMPLATE,
    VOCAB_SIZE,
    Script,
    ScriptedModel,
    byte_tokenizer,
    guessers,
    reply_start,
    says,
)

FAULT = "FAULT!"  # a prompt that holds it fails in the fourth step of its reply
CHATTER = 'Well! The "treehouse", that is: true; 7 of them. '
CONFIG = EngineConfig(
    block_size=4,
    num_blocks=256,
    max_model_len=384,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    max_prefill_chunk=32,
    max_waiting=256,
    default_drafter="auto",
    default_draft_tokens=3,
    max_draft_tokens=8,
)


class ServerProcess(msgspec.Struct):
    process: subprocess.Popen[bytes]
    port: int
    log_path: Path

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    @property
    def trace(self) -> str:
        """So far."""
        return self.log_path.with_name("trace.jsonl").read_text()

    @property
    def rss(self) -> int:
        """Bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    @property
    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def tasks(self) -> list[str]:
        """Names of the coroutines that run, this question's own among them."""
        names: list[str] = (await ask(self.port, "GET", "/debug/tasks")).json()
        return names

    async def metrics(self) -> dict[str, float]:
        """By series, labels included."""
        text = (await ask(self.port, "GET", "/metrics")).body.decode()
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {series: float(value) for series, value in lines}

    async def is_idle(self, seconds: float = 60) -> None:
        """Waits until no request and no block is live; AssertionError tells what is."""
        deadline = time.monotonic() + seconds
        while True:
            now = await self.metrics()
            live = {series: now[series] for series in LIVE}
            if not any(live.values()):
                return
            assert time.monotonic() < deadline, live
            await asyncio.sleep(0.02)

    async def has_traced(self, seconds: float = 60) -> None:
        """Waits until the trace file tells of a request made now: little is left to deliver."""
        mark = secrets.token_hex(16)
        await ask(self.port, "GET", "/health", headers={"traceparent": f"00-{mark}-{'c' * 16}-01"})
        deadline = time.monotonic() + seconds
        while mark not in self.trace:
            assert time.monotonic() < deadline, self.log
            await asyncio.sleep(0.05)

    async def has_only(self, num_files: int, tasks: Seq[str], seconds: float = 60) -> None:
        """Waits until no file and no task is left beside these; AssertionError tells what is."""
        deadline = time.monotonic() + seconds
        while True:
            now = (self.num_files, sorted(await self.tasks()))
            if now[0] <= num_files and now[1] == sorted(tasks):
                return
            assert time.monotonic() < deadline, (now, num_files, tasks)
            await asyncio.sleep(0.05)


LIVE = (
    "specserve_requests_running",
    *(f'specserve_requests_waiting{{reason="{reason}"}}' for reason in WAIT_REASONS),
    'specserve_kv_blocks{state="live"}',
)


@contextmanager
def a_server_process(
    folder: Path,
    *,
    slow_every: int = 0,
    fail_every: int = 0,
    options: Mapping[str, object] | None = None,
) -> Iterator[ServerProcess]:
    """slow_every, fail_every: each so many steps one takes 50 ms, and a guesser fails; 0: none

    folder: gets the log and the trace file; options: fields of ServeOptions
    """
    log_path = folder / "server.log"
    command = [sys.executable, "-m", "tests.server_process", str(folder)]
    command += [f"{slow_every}", f"{fail_every}", msgspec.json.encode(options or {}).decode()]
    with log_path.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield ServerProcess(process, _port_of(process, log_path), log_path)
    finally:
        process.kill()
        process.wait()


def _port_of(process: subprocess.Popen[bytes], log_path: Path) -> int:
    while True:
        said = log_path.read_text()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/metrics", said)
        if found is not None:
            return int(found.group(1))
        assert process.poll() is None, said
        time.sleep(0.05)


# ---- inside the process ----------------------------------------------------------------------


def script(history: Seq[int]) -> int:
    """Chatter and an end; a prompt that holds FAULT gets three tokens and then no logits."""
    start = reply_start(history)
    if len(history) >= start + 3 and FAULT.encode() in bytes(i for i in history if i < 256):
        return BROKEN
    return _chatter(history)


_chatter: Script = says(CHATTER)


def make_drafters(fail_every: int) -> dict[str, Drafter]:
    drafters: dict[str, Drafter] = dict(guessers(script))
    drafters["ngram"] = DRAFTERS["ngram"](
        DrafterResources(
            vocab_size=VOCAB_SIZE, num_blocks=CONFIG.num_blocks, block_size=CONFIG.block_size
        )
    )
    if fail_every:
        drafters["part"] = failing(drafters["part"], every=fail_every)
    return drafters


def slow_steps(every: int) -> Callable[[], None]:
    steps = itertools.count(1)

    def on_forward() -> None:
        if every and next(steps) % every == 0:
            time.sleep(0.05)

    return on_forward


def main(folder: str, slow_every: int, fail_every: int, more: dict[str, object]) -> int:
    def build_engine(options: ServeOptions, *, recorder: Recorder, **_: object) -> Built:
        model = ScriptedModel(script, slow_steps(slow_every))
        drafters = make_drafters(fail_every)
        engine = an_engine(
            model, CONFIG, recorder, byte_tokenizer(TOOL_TEMPLATE), drafters=drafters
        )
        memory = MemoryReport(
            budget=MIB,
            weights=0,
            activation=0,
            kv_bytes_per_token=model.kv_bytes_per_token(),
            block_size=CONFIG.block_size,
            num_blocks=CONFIG.num_blocks,
        )
        return Built(engine, Path("scripted"), memory, tuple(drafters))

    real_create_app = serve.create_app

    def create_app(*args: object, **keywords: object) -> web.Application:
        app = real_create_app(*args, **keywords)  # type: ignore[arg-type]  # passed on as they are
        app.router.add_get("/debug/tasks", _tasks)
        return app

    # The one seam: everything else is what the command does.
    serve.build_engine = build_engine  # type: ignore[assignment]
    serve.create_app = create_app  # type: ignore[assignment]
    asked = {
        "model": "test",
        "port": 0,
        "drafters": "oracle,anti,ngram",
        "drain_seconds": 20,
        "trace_file": f"{folder}/trace.jsonl",
    }
    return serve.serve(msgspec.convert(asked | more, ServeOptions))


async def _tasks(request: web.Request) -> web.Response:
    names = [task.get_coro().__qualname__ for task in asyncio.all_tasks()]  # type: ignore[union-attr]
    return web.json_response(sorted(names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])))
