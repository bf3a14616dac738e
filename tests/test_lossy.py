"""A lossy rule is only used when asked for by name, and whoever gets its text is told."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import get_args

import pytest
import structlog

from specserve.options import EngineOptions
from specserve.serve import warn_if_lossy
from specserve.types import LOSSY_RULES, VerifyRule
from specserve_observability.logs import configure_logging
from tests.http_server import a_server
from tests.scripted import says


@pytest.fixture
def json_logs() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, config = root.handlers[:], root.level, structlog.get_config()
    configure_logging(json=True)
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**config)


@pytest.mark.parametrize("rule", get_args(VerifyRule))
@pytest.mark.parametrize("endpoint", ["complete", "chat"])
async def test_every_reply_says_whether_its_rule_is_lossy(rule: str, endpoint: str) -> None:
    body = {"speculation": {"drafter": "part", "max_draft_tokens": 4, "verify": rule}}
    async with a_server(says("abcdefghijkl")) as server:
        ask = getattr(server, endpoint)
        whole = (await ask(**body)).json()["metrics"]
        events = (await ask(stream=True, **body)).events
    (streamed,) = [event["metrics"] for event in events if "metrics" in event]
    for metrics in (whole, streamed):
        assert metrics["specserve"]["lossy"] is (rule == "typical")


async def test_a_reply_that_names_no_rule_is_never_lossy() -> None:
    async with a_server(says("abc")) as server:
        metrics = (await server.complete()).json()["metrics"]
    assert metrics["specserve"]["lossy"] is False


def test_a_server_is_lossy_only_if_its_operator_says_so() -> None:
    assert EngineOptions().verify not in LOSSY_RULES


@pytest.mark.usefixtures("json_logs")
def test_a_lossy_server_warns_its_operator(capsys: pytest.CaptureFixture[str]) -> None:
    for rule in get_args(VerifyRule):
        warn_if_lossy(rule)
    (line,) = [json.loads(text) for text in capsys.readouterr().err.splitlines()]
    assert (line["event"], line["level"], line["verify"]) == (
        "lossy_verification",
        "warning",
        "typical",
    )
