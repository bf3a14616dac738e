"""Clients that people use, each in a process of its own, against a real port.

Every client is asked for the same (tests/clients/); what differs is how it spells what it got, and
that is what the tables here say.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from specserve.server.keys import KeyRing
from specserve.server.state import ServerSettings
from tests.http_server import Server, a_server
from tests.raw_http import connect, parse_events
from tests.scripted import ASSISTANT, BROKEN, USER, Script, says
from tests.test_server_reasoning import THINK_TEMPLATE
from tests.test_server_tools import LARGE

pytestmark = pytest.mark.timeout(240)

CLIENTS = Path(__file__).parent / "clients"
OLDER = Path(sys.prefix) / "older_clients"
KEY, BUSY_KEY = "k-0123456789abcdef", "k-fedcba9876543210"
TEXT = "héllo 🎉 wörld"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ANSWERS: dict[str, Script] = {
    "say": says(f"<think>hm</think>{TEXT}"),
    "add": says(f"Let me see.\n{CALL}"),
    "3": says("It is 3."),
    "describe": says('Well! The "shrub", that is: true; it {is', then=None),
    "break": says("12345", then=BROKEN),
    "Reply briefly with CANARY_OK.": says("CANARY_OK"),
}


def answers(history: Seq[int]) -> int:
    """What the last question's answer goes on with; to another question nothing is said. Behind a
    text without questions comes the next letter."""
    known = list(history)
    if ASSISTANT not in known:
        return known[-1] + 1
    begins = len(known) - known[::-1].index(ASSISTANT)
    asked = len(known) - known[::-1].index(USER)
    question = bytes(known[asked : begins - 1]).decode()
    return ANSWERS.get(question, says(""))(known[begins - 1 :])


@contextlib.asynccontextmanager
async def a_server_to_talk_to() -> AsyncIterator[Server]:
    """It knows two keys, and BUSY_KEY has as many requests under way as it may."""
    settings = ServerSettings(keys=KeyRing([KEY, BUSY_KEY]), max_concurrent_per_key=1)
    async with (
        a_server(answers, config=LARGE, settings=settings, template=THINK_TEMPLATE) as server,
        connect(server.port) as busy,
    ):
        head = ("POST /v1/completions HTTP/1.1", "host: x", "content-length: 9")
        lines = [*head, f"authorization: Bearer {BUSY_KEY}", "", "{"]
        await busy.send("\r\n".join(lines).encode())  # the rest of its body never comes
        yield server


async def run(*command: str, environment: dict[str, str] | None = None) -> str:
    """What it prints; asserts that it succeeds."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        cwd=CLIENTS,
    )
    try:
        out, err = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
            await process.wait()
    assert process.returncode == 0, err.decode() + out.decode()
    return out.decode()


def needs_python(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: make clients")


def needs_node(package: str) -> str:
    """The path of node."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    if not (CLIENTS / "node_modules" / package).is_dir():
        pytest.skip(f"{package} is not installed: make clients")
    return node


async def report_of(*command: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    async with a_server_to_talk_to() as server:
        said = await run(
            *command[:2], server.base_url, KEY, BUSY_KEY, *command[2:], environment=environment
        )
    report: dict[str, Any] = json.loads(said.splitlines()[-1])
    return report


def check_usage(report: dict[str, Any]) -> None:
    """Whole and streamed alike; the reply takes a token for each byte and one for its end."""
    assert report["chat"]["usage"] == report["stream"]["usage"]
    assert report["chat"]["usage"][1] == len(f"<think>hm</think>{TEXT}".encode()) + 1


def check_structured(value: Any) -> None:
    assert sorted(value) == ["kind", "sure"]
    assert value["kind"] in ("tree", "shrub")
    assert value["sure"] in (True, False)


SAID = {"text": TEXT, "reasoning": "hm", "reason": "stop"}
CALLED = ["add", {"a": 1, "b": 2}]
TOOLS = {"call": CALLED, "streamed": CALLED, "after": "It is 3."}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
async def test_litellm(provider: str) -> None:
    needs_python("litellm")
    report = await report_of(sys.executable, "with_litellm.py", provider)
    check_usage(report)
    check_structured(report["structured"])
    for way in ("chat", "stream"):
        assert {key: report[way][key] for key in SAID} == SAID
    assert report["tools"] == TOOLS
    assert report["breaks"] == ["12345", "MidStreamFallbackError"]
    assert report["refusals"] == {
        "400": "BadRequestError",
        "400, too long": "ContextWindowExceededError",
        "401": "AuthenticationError",
        "404": "NotFoundError",
        "429": "RateLimitError",
    }


async def test_langchain() -> None:
    needs_python("langchain_openai")
    report = await report_of(
        sys.executable, "with_langchain.py", environment={"LANGSMITH_TRACING": "false"}
    )
    check_usage(report)
    check_structured(report["structured"])
    for way in ("chat", "stream"):  # of chats it reads what OpenAI has: no reasoning
        assert (report[way]["text"], report[way]["reason"]) == (TEXT, "stop")
    assert report["tools"] == TOOLS
    assert report["responses"] == {"text": TEXT, "blocks": ["reasoning", "text"]}
    assert report["breaks"] == ["12345", "APIError"]
    assert report["refusals"] == {
        "400": "OpenAIInvalidRequestError",
        "400, too long": "OpenAIContextOverflowError",
        "401": "OpenAIAuthenticationError",
        "404": "OpenAIModelNotFoundError",
        "429": "OpenAIRateLimitError",
    }


async def test_llm(tmp_path: Path) -> None:
    needs_python("llm")
    async with a_server_to_talk_to() as server:
        write_models(tmp_path, server.base_url)
        environment = {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
        library = await run(
            sys.executable,
            "with_llm.py",
            server.base_url,
            KEY,
            BUSY_KEY,
            environment=environment,
        )
        command = await run(
            *(sys.executable, "-m", "llm", "-m", "test", "--key", KEY, "-o", "temperature", "0"),
            "say",
            environment=environment,
        )
    assert command == f"{TEXT}\n"
    report = json.loads(library)
    check_usage(report)
    check_structured(report["structured"])
    for way in ("chat", "stream"):
        assert report[way]["text"] == TEXT
    for way in ("tools", "streamed tools"):
        assert report[way] == {"text": "Let me see.\nIt is 3.", "calls": [CALLED]}
    assert report["breaks"] == ["12345", "APIError"]
    assert report["refusals"] == {
        "400": "BadRequestError",
        "400, too long": "BadRequestError",
        "401": "AuthenticationError",
        "404": "NotFoundError",
        "429": "RateLimitError",
    }


def write_models(directory: Path, url: str) -> None:
    """In YAML, of which JSON is a part."""
    models = [
        {
            "model_id": name,
            "model_name": name,
            "api_base": url,
            "api_key_name": "specserve",  # without one it sends no key
            "supports_schema": True,
            "supports_tools": True,
        }
        for name in ("test", "other")
    ]
    (directory / "extra-openai-models.yaml").write_text(json.dumps(models))


# By major version: the one that other tests use, and the one before it, which many still have.
VERSIONS = {
    "openai": {"2": ("2.54.0", OLDER), "3": ("3.", None)},
    "anthropic": {"1": ("1.17.0", OLDER), "2": ("2.", None)},
}
REFUSALS = {
    "400": "BadRequestError",
    "400, too long": "BadRequestError",
    "401": "AuthenticationError",
    "404": "NotFoundError",
    "429": "RateLimitError",
}


async def report_of_version(package: str, major: str) -> dict[str, Any]:
    version, folder = VERSIONS[package][major]
    if folder is not None and not (folder / package).is_dir():
        pytest.skip(f"{package} {version} is not installed: make clients")
    report = await report_of(
        *(sys.executable, f"with_{package}.py"),
        environment={"PYTHONPATH": "" if folder is None else str(folder)},
    )
    assert report["version"].startswith(version)
    return report


@pytest.mark.parametrize("major", VERSIONS["openai"])
async def test_openai_for_python(major: str) -> None:
    report = await report_of_version("openai", major)
    check_usage(report)
    check_structured(report["structured"])
    for way in ("chat", "stream"):
        assert {key: report[way][key] for key in SAID} == SAID
    assert report["tools"] == TOOLS
    responses = report["responses"]
    assert (responses["text"], responses["last"]) == (TEXT, "response.completed")
    assert responses["logprobs"] == responses["streamed"]
    assert len(responses["logprobs"]) == len(TEXT.encode()) + 1  # and its end
    assert report["completions"] == {"whole": "bcd", "streamed": "bcd", "tokens": 3}
    assert report["breaks"] == ["12345", "APIError"]
    assert report["models"] == ["test"]
    assert report["refusals"] == REFUSALS


@pytest.mark.parametrize("major", VERSIONS["anthropic"])
async def test_anthropic(major: str) -> None:
    report = await report_of_version("anthropic", major)
    check_usage(report)
    for way in ("chat", "stream"):
        assert report[way]["blocks"] == [["thinking", "hm"], ["text", TEXT]]
        assert report[way]["reason"] == "end_turn"
    assert report["tools"] == TOOLS
    assert report["count"] == report["chat"]["usage"][0]
    assert report["breaks"][0] == "12345"
    assert report["breaks"][1] in ("APIStatusError", "APIError", "InternalServerError")
    assert report["refusals"] == REFUSALS


async def test_openai_for_node() -> None:
    node = needs_node("openai")
    report = await report_of(node, "with_openai.mjs")
    check_usage(report)
    check_structured(report["structured"])
    for way in ("chat", "stream"):
        assert {key: report[way][key] for key in SAID} == SAID
    assert report["tools"] == TOOLS
    assert report["responses"] == {"text": TEXT, "last": "response.completed"}
    assert report["breaks"] == ["12345", "APIError"]
    assert report["models"] == ["test"]
    assert report["refusals"] == REFUSALS


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_reads_a_stream_to_its_end_and_an_error_with_its_status() -> None:
    body = {"model": "test", "messages": [{"role": "user", "content": "say"}], "temperature": 0}

    async def curl(server: Server, *more: str, key: str = KEY, **fields: Any) -> str:
        return await run(
            *("curl", "-sSN", f"{server.base_url}/chat/completions", "-w", "\n%{http_code}"),
            *("-H", "content-type: application/json", "-H", f"authorization: Bearer {key}"),
            *("-d", json.dumps({**body, **fields}), *more),
        )

    async with a_server_to_talk_to() as server:
        stream = await curl(server, stream=True, stream_options={"include_usage": True})
        packed = await curl(server, "--compressed")
        statuses = [
            (await curl(server, temperature=3)).splitlines()[-1],
            (await curl(server, key="wrong")).splitlines()[-1],
            (await curl(server, model="other")).splitlines()[-1],
            (await curl(server, key=BUSY_KEY)).splitlines()[-1],
        ]
    said, _, status = stream.rpartition("\n")
    *events, usage, done = parse_events(said.encode())
    assert (status, done) == ("200", "[DONE]")
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content") or "" for delta in deltas) == TEXT
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm"
    whole = json.loads(packed.rpartition("\n")[0])
    assert whole["choices"][0]["message"]["content"] == TEXT
    assert usage["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert statuses == ["400", "401", "404", "429"]


@pytest.mark.parametrize("profile", ["chat", "modern"])
async def test_compatcanary_finds_nothing(profile: str) -> None:
    """A conformance scanner: every probe of a profile passes, none with a warning."""
    node = needs_node("compatcanary")
    async with a_server_to_talk_to() as server:
        said = await run(
            *(node, "node_modules/compatcanary/src/cli.js", "scan", "--model", "test"),
            *("--base-url", server.base_url, "--profile", profile, "--api-key", KEY),
            *("--format", "json", "--fail-on", "any"),
        )
    probes = {probe["id"]: probe["status"] for probe in json.loads(said)["results"]}
    assert set(probes.values()) == {"pass"}, probes
    assert len(probes) == {"chat": 5, "modern": 7}[profile]
