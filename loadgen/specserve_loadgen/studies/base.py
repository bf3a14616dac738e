"""What every study over HTTP says of itself, in the order in which its file has it."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from specserve_loadgen.report import Environment

PlanT = TypeVar("PlanT", bound=msgspec.Struct)


class Study(msgspec.Struct, Generic[PlanT], frozen=True, kw_only=True):
    """plan: what was asked for"""

    schema: str
    started_at: float  # time.time()
    seconds: float
    environment: Environment
    plan: PlanT
    model: str
    server_version: str | None
