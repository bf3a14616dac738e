"""README.md names tests; each of them exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
# Rows of the list of reports that come first; a report is left out only if its feature is.
FIRST = (
    1, 3, 4, 5, 9, 10, 11, 13, 14, 15, 17, 20, 22, 23, 24, 25, 27, 29, 32, 33, 36, 37, 38, 40, 42,
    43, 45, 47, 48, 52, 53, 56, 58, 60, 61, 63,
)  # fmt: skip


def names_in(module: str) -> set[str]:
    tree = ast.parse((HERE / f"{module}.py").read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, functions)}


def test_every_test_that_the_table_names_exists() -> None:
    named = re.findall(r"`(test_\w+)::(test_\w+)`", (HERE / "README.md").read_text())
    assert len(named) > 90
    missing = [f"{module}::{name}" for module, name in named if name not in names_in(module)]
    assert missing == []


def test_every_report_that_comes_first_has_a_test() -> None:
    rows = re.findall(
        r"^\| P(\d\d)★ \|.*`test_\w+::", (HERE / "README.md").read_text(), re.MULTILINE
    )
    assert [int(row) for row in rows] == list(FIRST)
