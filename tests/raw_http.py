"""A client without a library: it writes bytes, reads bytes, and parses what it must by hand."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any  # decoded JSON

import msgspec


class Reply(msgspec.Struct):
    status: int
    headers: dict[str, str]  # lower-case names
    body: bytes  # chunked coding removed

    def json(self) -> Any:
        return strict_json(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, with its four keys and nothing beside it."""
        document = self.json()
        assert list(document) == ["error"]
        error: dict[str, Any] = document["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        return error

    @property
    def events(self) -> list[Any]:
        """Decoded data of each event, "[DONE]" as it is; asserts the framing byte by byte."""
        return parse_events(self.body)


def strict_json(raw: bytes) -> Any:
    """NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {raw!r}")

    return json.loads(raw, parse_constant=refuse)


def parse_events(body: bytes) -> list[Any]:
    """Every block is a comment or exactly one data line, and ends with an empty line."""
    assert body == b"" or body.endswith(b"\n\n"), body[-80:]
    events: list[Any] = []
    for block in body.split(b"\n\n")[:-1]:
        assert b"\n" not in block, block
        if block.startswith(b": "):
            continue
        assert block.startswith(b"data: "), block
        data = block.removeprefix(b"data: ")
        events.append("[DONE]" if data == b"[DONE]" else strict_json(data))
    return events


class Connection:
    """One TCP connection to the server under test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, raw: bytes) -> None:
        self.writer.write(raw)
        await self.writer.drain()

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """body: bytes as they are, anything else as JSON."""
        raw = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        all_headers = {"host": "test", **(headers or {})}
        lines = [f"{method} {path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in all_headers.items()]
        if body is not None:
            lines += ["content-type: application/json", f"content-length: {len(raw)}"]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + raw)

    async def read_head(self) -> tuple[int, dict[str, str]]:
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        status_line, *lines = head.split("\r\n")[:-2]
        headers = dict(line.split(": ", 1) for line in lines)
        return int(status_line.split(" ")[1]), {
            key.lower(): value for key, value in headers.items()
        }

    async def read_chunk(self) -> bytes:
        """One chunk of a chunked body; b"" is the last."""
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def read_reply(self) -> Reply:
        status, headers = await self.read_head()
        if headers.get("transfer-encoding") == "chunked":
            chunks: list[bytes] = []
            while chunk := await self.read_chunk():
                chunks.append(chunk)
            return Reply(status, headers, b"".join(chunks))
        body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Reply(status, headers, body)

    async def is_closed(self) -> bool:
        """Waits until the server closes; False if it sends anything instead."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionResetError:
            return True

    def reset(self) -> None:
        """Close with RST, as a killed client does."""
        self.writer.transport.abort()


@asynccontextmanager
async def connect(port: int, *, receive_buffer: int | None = None) -> AsyncIterator[Connection]:
    sock = socket.socket()
    sock.setblocking(False)
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    limit = 2**20 if receive_buffer is None else receive_buffer
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=limit)
    except BaseException:  # whoever is cancelled here leaves no socket behind
        sock.close()
        raise
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()
        # Lets the transport close its socket before the loop goes.
        await asyncio.sleep(0)


async def ask(
    port: int,
    method: str,
    path: str,
    body: object = None,
    *,
    headers: Mapping[str, str] | None = None,
) -> Reply:
    """One request on its own connection."""
    async with connect(port) as connection:
        await connection.request(method, path, body, headers=headers)
        return await connection.read_reply()
