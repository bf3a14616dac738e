"""Fixtures of general use. The demo model is real: SmolLM2-135M-Instruct, in the user's cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.demo import pull_demo
from specserve.errors import ModelError


@pytest.fixture(scope="session")
def demo_model_dir() -> Path:
    """The demo model's directory, fetched on first use; skips where it cannot be had."""
    try:
        return pull_demo()
    except ModelError as error:
        pytest.skip(f"the demo model cannot be had: {error}")
