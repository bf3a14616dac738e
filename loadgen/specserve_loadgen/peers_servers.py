"""The servers of a comparison: how each is started, when it is ready, and how it is stopped.

Only one runs at a time, since an idle server may spin. Prefix caches are off everywhere: prompts
that a server has seen must not cost it less than they cost the others. `{port}` in a command
stands for the port that `Running` chooses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import aiohttp
import msgspec

from specserve_loadgen import peers_openvino
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.peers_install import is_installed
from specserve_loadgen.peers_process import group_members
from specserve_loadgen.peers_recipes import (
    LLAMA,
    NAMES,
    OFFLINE,
    OPENVINO,
    VLLM,
    python_of,
    recipes,
)

OURS = "specserve"
MODEL_NAME = "demo"  # what every server calls the model
CONTEXT = 2048  # tokens per request; prompt 512 and 128 new ones fit several times
SLOTS = 16  # requests at once
START_SECONDS = 600.0  # vLLM CPU needs 160-180 on two idle cores
STOP_SECONDS = 20.0
LOG_TAIL_LINES = 5

Precision = Literal["int8", "bf16"]
Speculation = Literal["off", "on"]


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve the model."""

    name: str
    peer: str  # OURS, or a name of peers_recipes.NAMES
    version: str
    precision: Precision
    speculation: Speculation
    argv: tuple[str, ...]
    env: Mapping[str, str] = {}


class Lineup(msgspec.Struct, frozen=True):
    servers: tuple[Server, ...]
    left_out: Mapping[str, str]  # name of a peer: why it takes no part


def lineup(
    cache: Path,
    model_dir: Path,
    serve: Sequence[str],
    *,
    peers: Sequence[str] = NAMES,
    auto: Sequence[str] = (),
) -> Lineup:
    """Ours first, then every installed peer, in the order in which a round visits them.

    serve: our command line up to and with `serve`
    auto: flags of ours that turn speculation on, where its default is not wanted
    """
    servers = [*_ours(serve, auto)]
    left_out = {}
    known = recipes(cache, model_dir)
    builders = {"llamacpp": _llama, "vllm": _vllm, "openvino": _openvino}
    for name in peers:
        if is_installed(known[name], cache):
            servers += builders[name](cache / name, model_dir)
        else:
            left_out[name] = f"not installed: specserve loadgen peers --install --peers {name}"
    return Lineup(tuple(servers), left_out)


def _ours(serve: Sequence[str], auto: Sequence[str]) -> list[Server]:
    common = ("--port", "{port}", "--served-model-name", MODEL_NAME, "--no-prefix-caching")
    precisions: tuple[Precision, ...] = ("int8", "bf16")
    modes: tuple[tuple[Speculation, tuple[str, ...]], ...] = (
        ("off", ("--drafters", "none", "--speculation", "off")),
        ("on", tuple(auto)),
    )
    return [
        Server(
            name=f"{OURS} {precision}" + (" auto" if speculation == "on" else ""),
            peer=OURS,
            version="this checkout",
            precision=precision,
            speculation=speculation,
            argv=(*serve, "--dtype", precision, *common, *flags),
        )
        for precision in precisions
        for speculation, flags in modes
    ]


def _llama(folder: Path, model_dir: Path) -> list[Server]:
    files: tuple[tuple[Precision, str], ...] = (("int8", "Q8_0"), ("bf16", "BF16"))
    modes: tuple[tuple[Speculation, str, tuple[str, ...]], ...] = (
        ("off", "", ()),
        ("on", " ngram-mod", ("--spec-type", "ngram-mod")),
    )
    threads = str(_num_cores())
    return [
        Server(
            name=f"llama.cpp {kind}{suffix}",
            peer="llamacpp",
            version=LLAMA,
            precision=precision,
            speculation=speculation,
            argv=(
                str(folder / "build" / "bin" / "llama-server"),
                *("-m", str(folder / "models" / f"{kind}.gguf"), "--alias", MODEL_NAME),
                *("--host", "127.0.0.1", "--port", "{port}", "-t", threads, "-tb", threads),
                *("-np", str(SLOTS), "-c", str(SLOTS * CONTEXT)),
                *("--no-cache-prompt", "--cache-ram", "0", "--no-ui", *flags),
            ),
        )
        for precision, kind in files
        for speculation, suffix, flags in modes
    ]


def _vllm(folder: Path, model_dir: Path) -> list[Server]:
    ngram = msgspec.json.encode(
        {
            "method": "ngram",
            "num_speculative_tokens": 5,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    ).decode()
    modes: tuple[tuple[Speculation, str, tuple[str, ...]], ...] = (
        ("off", "", ()),
        ("on", " ngram", ("--speculative-config", ngram)),
    )
    return [
        Server(
            name=f"vLLM bf16{suffix}",
            peer="vllm",
            version=VLLM,
            precision="bf16",
            speculation=speculation,
            argv=(
                *(str(folder / "bin" / "vllm"), "serve", str(model_dir)),
                *("--host", "127.0.0.1", "--port", "{port}", "--served-model-name", MODEL_NAME),
                *("--dtype", "bfloat16", "--max-model-len", str(CONTEXT)),
                *("--max-num-seqs", str(SLOTS), "--no-enable-prefix-caching", *flags),
            ),
            env={
                **OFFLINE,
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": _all_cores(),
                "VLLM_NO_USAGE_STATS": "1",
            },
        )
        for speculation, suffix, flags in modes
    ]


def _openvino(folder: Path, model_dir: Path) -> list[Server]:
    modes: tuple[tuple[Speculation, str, tuple[str, ...]], ...] = (
        ("off", "", ()),
        ("on", " lookup", ("--lookup-tokens", "5")),
    )
    return [
        Server(
            name=f"OpenVINO int8{suffix}",
            peer="openvino",
            version=OPENVINO[0],
            precision="int8",
            speculation=speculation,
            argv=(
                *(python_of(folder), str(peers_openvino.__file__), str(folder / "models" / "int8")),
                *("--port", "{port}", "--name", MODEL_NAME, "--slots", str(SLOTS), *flags),
            ),
            env=OFFLINE,
        )
        for speculation, suffix, flags in modes
    ]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _all_cores() -> str:
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


class Running:
    """A started server that has answered one request; stopped, with its children, on exit.

    Raises LoadgenError with the last lines it printed where it ends or stays silent.
    """

    def __init__(self, server: Server, log: Path, *, start_seconds: float = START_SECONDS) -> None:
        self._server = server
        self._log = log
        self._patience = start_seconds
        self.start_seconds = 0.0  # from the command to the first answered request

    async def __aenter__(self) -> Self:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        argv = [part.replace("{port}", str(port)) for part in self._server.argv]
        started = time.monotonic()
        with self._log.open("wb") as output:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *argv,
                    env={**os.environ, **self._server.env},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,  # so that it can be stopped with its children
                )
            except OSError as error:
                raise LoadgenError(f"{argv[0]}: {error.strerror or error}") from None
        try:
            await self._until_ready()
        except BaseException:
            await self._stop()
            raise
        self.start_seconds = time.monotonic() - started
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _until_ready(self) -> None:
        deadline = time.monotonic() + self._patience
        body = {"model": MODEL_NAME, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        async with aiohttp.ClientSession() as session:
            while time.monotonic() < deadline:
                if self._process.returncode is not None:
                    raise LoadgenError(
                        f"{self._server.name} ended with exit code {self._process.returncode}: "
                        f"{self._tail()}"
                    )
                with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                    limit = aiohttp.ClientTimeout(total=max(1.0, deadline - time.monotonic()))
                    async with session.post(
                        f"{self.url}/v1/completions", json=body, timeout=limit
                    ) as response:
                        if response.status == 200:
                            await response.read()
                            return
                await asyncio.sleep(0.2)
        raise LoadgenError(
            f"{self._server.name} answered nothing in {self._patience:g} s: {self._tail()}"
        )

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return " | ".join(line.strip() for line in lines[-LOG_TAIL_LINES:]) + f" ({self._log})"

    async def _stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            # The group outlives its leader where a worker hangs: ask it until nobody is left.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
                    while group_members(self._process.pid):  # noqa: ASYNC110 # the kernel tells
                        await asyncio.sleep(0.05)
                    return


def free_port() -> int:
    """A port on the loopback address that nobody had a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
