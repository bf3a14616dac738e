"""schemathesis reads /openapi.json and asks for what it says, and for what it does not say.

No 5xx, and no reply or event whose status, type, headers or body the document does not describe.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server_process import a_server_process

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None,
    reason="schemathesis is not installed: make clients",
)
async def test_two_thousand_requests_get_what_the_document_says(tmp_path: Path) -> None:
    """Good data and bad, at every limit (coverage) and at random (fuzzing)."""
    report = tmp_path / "report.json"
    with a_server_process(tmp_path) as server:
        files, tasks = server.num_files, await server.tasks()
        document = f"http://127.0.0.1:{server.port}/openapi.json"
        said = await asyncio.to_thread(
            subprocess.run,
            [
                *(str(Path(sys.executable).with_name("st")), "run", document, "--no-color"),
                *("--phases", "coverage,fuzzing", "--max-examples", "60"),
                *("--checks", ",".join(CHECKS), "--request-timeout", "60"),
                *("--continue-on-failure", "--report-json-path", str(report)),
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert said.returncode == 0, said.stdout[-8000:]
        await server.is_idle()
        await server.has_only(files, tasks)
        assert "engine_failed" not in server.log
    counts = json.loads(report.read_text())["test_cases"]
    print(counts)
    assert counts["with_failures"] == counts["errored"] == 0
    assert counts["generated"] >= 2000
