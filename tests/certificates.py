"""Certificates for tests of TLS, made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates")


def a_certificate(folder: Path, *, password: str | None = None) -> tuple[str, str]:
    """Paths of a certificate for 127.0.0.1, signed by itself, and of its key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    asked = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2 -subj /CN=test"
    subprocess.run(
        [
            *(*asked.split(), "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", key, "-out", cert),
            *(["-nodes"] if password is None else ["-passout", f"pass:{password}"]),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key
