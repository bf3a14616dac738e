"""Fixtures of general use. The demo model is real: SmolLM2-135M-Instruct, in the user's cache."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from specserve.spinning import spin_briefly

spin_briefly()

# A busy machine is no failure: no example has a time limit.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Helpers assert too; rewritten asserts also hold under `python -O`.
pytest.register_assert_rewrite(
    *(f"tests.{name}" for name in ("browser", "build", "engines", "http_server", "otlp_receiver")),
    *(f"tests.{name}" for name in ("prometheus_server", "prometheus_text", "raw_http")),
    *(f"tests.{name}" for name in ("server_process", "trace_reading", "ways")),
)

from specserve.demo import pull_demo  # noqa: E402 (after the registration above)
from specserve.errors import ModelError  # noqa: E402
from tests.ways import WAYS, Way  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Triton reads this once, when it is first imported: before any test module is."""
    if config.getoption("markexpr") != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    """For tests that configure logging: afterwards it is what it was before."""
    root = logging.getLogger()
    handlers, level, config = root.handlers[:], root.level, structlog.get_config()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**config)
    structlog.contextvars.clear_contextvars()


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model's directory, fetched on first use; skips where it cannot be had."""
    try:
        return pull_demo()
    except ModelError as error:
        pytest.skip(f"the demo model cannot be had: {error}")


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    """How a request is asked: each of {nobody, oracle, anti, ngram} guesses, streamed and not."""
    chosen: Way = request.param
    return chosen
