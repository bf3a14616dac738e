"""A server of its own process for `loadgen peers` tests: fixed speed, child process, or early end.

Run as a script; prints its child's pid where it has one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from typing import Any

from aiohttp import web


async def answer(request: web.Request, chat: bool, delay: float) -> web.StreamResponse:
    body: dict[str, Any] = await request.json()
    num_tokens = body["max_tokens"]
    text = body["messages"][0]["content"] if chat else body["prompt"]
    if "FAIL" in text:
        return web.json_response({"error": {"message": "told to fail"}}, status=500)
    usage = {"prompt_tokens": len(text.split()), "completion_tokens": num_tokens}
    if not body.get("stream"):
        return web.json_response({"choices": [{"text": "x" * num_tokens}], "usage": usage})
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for idx in range(num_tokens):
        await asyncio.sleep(delay)
        choice = {"delta": {"content": "x"}} if chat else {"text": "x"}
        chunk = {"choices": [{**choice, "token_ids": [idx]}], "usage": usage}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    return response


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    # Our server's options, so that it can stand in for it.
    for name in ("dtype", "served-model-name", "drafters", "speculation"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each token")
    parser.add_argument("--child", action="store_true")
    options = parser.parse_args()
    if options.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "demo"}]})

    async def chat(request: web.Request) -> web.StreamResponse:
        return await answer(request, True, options.delay)

    async def completions(request: web.Request) -> web.StreamResponse:
        return await answer(request, False, options.delay)

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/chat/completions", chat)
    app.router.add_post("/v1/completions", completions)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
