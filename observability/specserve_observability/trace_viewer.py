"""`specserve trace serve FILE...`: a page that shows a trace file, and Jaeger's API beside it.

One thread reads the files and follows them as they grow; requests are answered from what it has
put into the store. Nobody else's machine is asked for anything, and nothing here is written.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from .jaeger_api import JaegerApi
from .otlp_reading import TraceFileError, read_spans
from .static_pages import PAGE_HEADERS, pages_of
from .trace_files import TraceFile, check_first_lines
from .trace_store import TraceStore

DEFAULT_PORT = 16686  # Jaeger's: what its UI in development and Grafana's source ask by default
_DEFAULT_MEMORY_MB = 512
_POLL_SECONDS = 0.5
_MAX_UPLOAD_BYTES = 256 * 2**20
_TOLD_BAD_LINES = 5
_FOLDER = Path(__file__).parent / "viewer"


class FileReader:
    """Puts what the files say into the store; `run` follows them until `stop` is called.

    Raises OSError for a file that is not there, TraceFileError for one that is something else.
    """

    def __init__(self, paths: Sequence[Path], store: TraceStore) -> None:
        self._store = store
        self.files = [TraceFile(path) for path in paths]
        self._stopping = threading.Event()
        self._out_of_reach: set[Path] = set()  # each is told once, until it is back
        self.num_bad_lines = 0
        for path in paths:
            check_first_lines(path)

    def read(self) -> None:
        """All that is there now. A file that is out of reach is looked for again by the next."""
        for file in self.files:
            try:
                for line in file.new_lines():
                    if self._stopping.is_set():
                        return
                    self._take(file.path, line)
            except OSError as error:  # such as a folder that was moved away
                if file.path not in self._out_of_reach:
                    print(f"{file.path}: cannot be read now ({error})", file=sys.stderr, flush=True)
                self._out_of_reach.add(file.path)
            else:
                self._out_of_reach.discard(file.path)

    def run(self) -> None:
        self.read()
        while not self._stopping.wait(_POLL_SECONDS):
            self.read()
        self.close()

    def stop(self) -> None:
        self._stopping.set()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def _take(self, path: Path, line: bytes) -> None:
        if not line.strip():
            return
        try:
            self._store.add(read_spans(line))
        except (ValueError, RecursionError) as error:  # TraceFileError is one
            self.num_bad_lines += 1
            if self.num_bad_lines <= _TOLD_BAD_LINES:
                said = f"{path}: left out a line that is {error}: {line[:60]!r}"
                print(said, file=sys.stderr, flush=True)


def viewer_app(store: TraceStore, reader: FileReader, host: str = "localhost") -> web.Application:
    """host: a name by which it may be called, beside localhost and addresses"""

    async def status(request: web.Request) -> web.Response:
        said = {
            "files": [str(file.path) for file in reader.files],
            "spans": store.num_spans,
            "traces": store.num_traces,
            "evictedTraces": store.num_evicted_traces,
            "badLines": reader.num_bad_lines,
            "megabytes": round(store.num_bytes / 2**20, 1),
        }
        return web.Response(body=msgspec.json.encode(said), content_type="application/json")

    async def to_trace(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"/#trace={request.match_info['trace_id']}")

    middlewares = [_with_headers, _known_host(host)]
    app = web.Application(middlewares=middlewares, client_max_size=_MAX_UPLOAD_BYTES)
    app.add_routes(JaegerApi(store).routes())
    app.router.add_get("/viewer/status", status)
    # Where links to Jaeger's UI lead.
    app.router.add_get("/trace/{trace_id:[0-9a-fA-F]+}", to_trace)
    for route, handler in pages_of(_FOLDER, "/viewer/").items():
        app.router.add_get(route, handler)
    return app


def serve_main(argv: Sequence[str]) -> int:
    """`specserve trace serve FILE...`, without its first two words. Returns the exit status."""
    args = _parser().parse_args(argv)
    store = TraceStore(args.memory_mb * 2**20)
    try:
        reader = FileReader(args.files, store)
        asyncio.run(_serve(store, reader, args.host, args.port))
    except (TraceFileError, OSError) as error:
        print(f"specserve trace serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specserve trace serve",
        description="Show trace files in a browser, and answer Jaeger's query API for its UI or "
        "Grafana. Files are followed while they grow and are rotated.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="by --trace-file")
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine only")
    parser.add_argument("--port", type=_port, default=DEFAULT_PORT, help="default 16686, Jaeger's")
    parser.add_argument(
        "--memory-mb",
        type=_megabytes,
        default=_DEFAULT_MEMORY_MB,
        metavar="MB",
        help=f"how much is kept; the oldest traces go first (default {_DEFAULT_MEMORY_MB})",
    )
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: give 0 to 65535")
    return int(text)


def _megabytes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of megabytes: give 1 or more")
    return int(text)


async def _serve(store: TraceStore, reader: FileReader, host: str, port: int) -> None:
    runner = web.AppRunner(viewer_app(store, reader, host))
    await runner.setup()
    thread = threading.Thread(target=reader.run, name="specserve-trace-files")
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise OSError(
                f"cannot listen on {host}:{port} ({error.strerror}): perhaps a Jaeger is there, "
                "choose another with --port"
            ) from error
        thread.start()
        _say_where(runner, host)
        await _told_to_end()
    finally:
        reader.stop()
        await runner.cleanup()
        if thread.ident is not None:
            await asyncio.to_thread(thread.join)


async def _told_to_end() -> None:
    told = asyncio.Event()
    with contextlib.suppress(NotImplementedError):  # where a loop has no signals, Ctrl-C raises
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
    await told.wait()


def _say_where(runner: web.AppRunner, host: str) -> None:
    port = runner.addresses[0][1]
    shown = f"[{host}]" if ":" in host else host
    print(f"traces at http://{shown}:{port}/ (Jaeger's API beside them); Ctrl-C ends", flush=True)
    if not _is_loopback(host):
        print("anybody who reaches this address can read the traces", file=sys.stderr, flush=True)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _known_host(host: str) -> Middleware:
    """A web page that gave its own name this machine's address must not read traces."""
    names = ("localhost", host.lower())

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        name = (request.url.host or "").lower()
        if name not in names and not _is_address(name):
            raise web.HTTPForbidden(
                text=f"the host is {name[:80]!r}: ask by address or as localhost, "
                "or start with --host and that name"
            )
        return await handler(request)

    return check


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@web.middleware
async def _with_headers(request: web.Request, handler: Handler) -> web.StreamResponse:
    response = await handler(request)
    response.headers.update(PAGE_HEADERS)
    return response
