"""The whole thing as a newcomer meets it: the command, the demo model, real clients and sockets."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest

from tests.certificates import a_certificate, needs_openssl
from tests.serve_command import Server, command, start

pytestmark = [pytest.mark.demo, pytest.mark.timeout(600)]

COPY = (
    "Repeat this list exactly, twice: apple, banana, cherry, damson, elderberry, fig, grape. "
    "apple, banana, cherry, damson, elderberry, fig, grape."
)


@pytest.fixture(scope="module")
def server(demo_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(tmp_path_factory.mktemp("serve"), "--drafters", "ngram")
    yield running
    running.kill()


def test_it_says_where_it_is_what_memory_it_takes_and_what_to_type_next(server: Server) -> None:
    said = server.greeting
    found = re.search(
        r"= ([\d,]+) blocks x 16 tokens x ([\d,]+) bytes per token \((\d+) KiB per block\)",
        said.replace("\n", " "),
    )
    assert found is not None, said
    blocks, per_token, per_block = (int(text.replace(",", "")) for text in found.groups())
    # SmolLM2-135M: 2 x 30 layers x 3 KV heads x 64 x 4 or 2 bytes
    assert per_token in (46_080, 23_040)
    assert per_block == per_token * 16 // 1024
    assert blocks * per_block * 1024 <= 2**30
    assert "curl -N" in said
    assert "specserve loadgen" in said


def test_the_openai_client_streams_chat_with_speculation_on(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    [model] = client.models.list().data
    assert model.id == "demo"
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": COPY}],
        temperature=0,
        max_tokens=48,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, spec, usage = "", None, None
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            text += chunk.choices[0].delta.content
        if chunk.model_extra and chunk.model_extra.get("metrics"):
            spec = chunk.model_extra["metrics"]["speculative_decoding"]
        usage = chunk.usage or usage
    assert "banana, cherry, damson" in text
    assert usage is not None
    assert spec is not None
    assert 8 < usage.completion_tokens <= 48
    # Copying is what n-gram lookup is for: well over one token per target step.
    assert spec["mean_acceptance_length"] > 1.5
    assert sum(spec["acceptance_histogram"]) == spec["num_spec_steps"]
    assert 0 < spec["num_accepted_draft_tokens"] <= spec["num_draft_tokens"]


def test_a_reply_follows_its_schema_and_is_the_same_whoever_guesses(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "colours": {
                "type": "array",
                "items": {"enum": ["red", "green", "blue"]},
                "minItems": 1,
                "maxItems": 3,
            },
        },
        "required": ["name", "age", "colours"],
        "additionalProperties": False,
    }
    texts = set()
    for drafter in ("none", "ngram", "auto"):
        reply = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Invent a person: name, age and colours."}],
            temperature=0.7,
            seed=3,
            max_tokens=160,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            extra_body={"speculation": {"drafter": drafter}},
        )
        assert reply.choices[0].finish_reason == "stop"
        texts.add(reply.choices[0].message.content)
    [text] = texts
    assert text is not None
    person = json.loads(text)
    assert list(person) == ["name", "age", "colours"]
    assert len(person["name"]) <= 24
    assert 0 <= person["age"] <= 130
    assert 1 <= len(person["colours"]) <= 3
    assert set(person["colours"]) <= {"red", "green", "blue"}


def test_text_is_the_same_with_speculation_off_and_streamed_or_not(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    texts = set()
    for speculation in ({"drafter": "none"}, {"drafter": "ngram", "max_draft_tokens": 5}):
        for stream in (False, True):
            reply = client.completions.create(
                model="demo",
                prompt="def fibonacci(n):",
                temperature=0.8,
                seed=11,
                max_tokens=40,
                stream=stream,
                extra_body={"speculation": speculation},
            )
            if stream:
                texts.add("".join(chunk.choices[0].text for chunk in reply))
            else:
                texts.add(reply.choices[0].text)
    assert len(texts) == 1
    assert len(texts.pop()) > 40


def test_loadgen_measures_what_speculation_saved(server: Server, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": COPY}) + "\n")
    out = tmp_path / "run.json"
    done = subprocess.run(
        command(
            *("loadgen", "--url", server.url, "--prompts", str(prompts), "--no-progress"),
            *("--concurrency", "2", "--num-requests", "4", "--max-tokens", "24"),
            *("--temperature", "0", "--json", str(out)),
        ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "TTFT" in done.stdout
    assert "ITL" in done.stdout
    assert "acceptance" in done.stdout.lower()
    assert json.loads(out.read_text())


@pytest.mark.slow
async def test_health_answers_at_once_while_long_prompts_are_computed(server: Server) -> None:
    """64 prefills; the 99th percentile of /health stays under 50 ms: the loop never waits."""
    words = " ".join(f"word{i}" for i in range(200))  # about 800 tokens
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=100)) as session:

        async def prefill(idx: int) -> int:
            body = {"model": "demo", "prompt": f"{idx} {words}", "max_tokens": 1}
            async with session.post(f"{server.url}/v1/completions", json=body) as reply:
                await reply.read()
                return reply.status

        prefills = [asyncio.create_task(prefill(idx)) for idx in range(64)]
        seconds = []
        while not all(task.done() for task in prefills):
            began = time.perf_counter()
            async with session.get(f"{server.url}/health") as reply:
                assert reply.status == 200
                await reply.read()
            seconds.append(time.perf_counter() - began)
            await asyncio.sleep(0.02)
        assert [await task for task in prefills] == [200] * 64
    assert len(seconds) > 100
    p99 = sorted(seconds)[int(0.99 * len(seconds))]
    print(f"/health during 64 prefills: {len(seconds)} probes, p99 {p99 * 1000:.1f} ms")
    assert p99 < 0.05


def test_sigterm_lets_a_live_stream_finish_and_the_trace_file_tells_the_steps(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    running = start(tmp_path)
    try:
        client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
        stream = client.completions.create(
            model="demo", prompt="Once upon a time", max_tokens=30, temperature=0, stream=True
        )
        chunks = [next(iter(stream))]
        running.process.send_signal(signal.SIGTERM)
        chunks += list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert running.process.wait(60) == 0
    finally:
        running.kill()
    spans = [
        span
        for line in running.trace_file.read_text().splitlines()
        for group in json.loads(line)["resourceSpans"]
        for scope in group["scopeSpans"]
        for span in scope["spans"]
    ]
    names = {span["name"] for span in spans}
    assert {
        "engine.window",
        "engine.step",
        "plan",
        "draft",
        "target_forward",
        "verify",
        "commit",
        "queue",
        "prefill",
        "decode",
        "tokenize",
    } <= names
    decode = next(span for span in spans if span["name"] == "decode")
    linked = {link["spanId"] for s in spans if s["name"] == "engine.step" for link in s["links"]}
    assert decode["spanId"] in linked
    out = tmp_path / "jaeger.json"
    done = subprocess.run(
        command(
            *("trace", "export", str(running.trace_file), "--format", "jaeger-json", "-o", str(out))
        ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    exported = json.loads(out.read_text())["data"]
    assert {span["operationName"] for trace in exported for span in trace["spans"]} == names


@needs_openssl
async def test_https_keys_and_pages_are_served_as_the_command_line_says(
    demo_model_dir: Path, tmp_path: Path
) -> None:
    cert, key = a_certificate(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("the-only-key-there-is\n")
    page = "https://chat.example.org"
    running = start(
        tmp_path,
        *("--ssl-certfile", cert, "--ssl-keyfile", key, "--api-key-file", str(keys)),
        *("--cors-origins", page, "--drafters", "none", "--kv-cache-gb", "0.1"),
    )
    try:
        assert running.url.startswith("https://")
        assert "-H 'authorization: Bearer KEY'" in running.greeting
        tls = ssl.create_default_context(cafile=cert)
        headers = {"origin": page, "authorization": "Bearer the-only-key-there-is"}
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls)) as session:
            async with session.get(f"{running.url}/v1/models") as reply:
                assert reply.status == 401
            async with session.get(f"{running.url}/ready") as reply:
                assert reply.status == 200
            body = {"prompt": "Once", "max_tokens": 4}
            url = f"{running.url}/v1/completions"
            async with session.post(url, json=body, headers=headers) as reply:
                assert reply.status == 200
                assert reply.headers["access-control-allow-origin"] == page
                assert (await reply.json())["usage"]["completion_tokens"] == 4
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(running.process.wait, 60) == 0
    finally:
        running.kill()
