"""What was logged, line by line."""

from __future__ import annotations

import json
from typing import Any  # decoded JSON

import pytest


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Every line on stderr; there is none on stdout."""
    captured = capsys.readouterr()
    assert captured.out == ""
    return [json.loads(line) for line in captured.err.splitlines()]
