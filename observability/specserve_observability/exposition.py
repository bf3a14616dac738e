"""What a scrape of /metrics is answered with: Prometheus text, or OpenMetrics, which has exemplars.

With vLLM's names it is always the text format: their colons are not for OpenMetrics, where
scrapers may escape them and every query would come back empty.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from .families import Family, families
from .histogram import Exemplar
from .metrics import Gauges, Metrics
from .vllm_families import VllmNames, vllm_families

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_OPENMETRICS_VERSIONS = ("", "0.0.1", "1.0.0")  # what 1.0.0 can be read as


class Exposition(msgspec.Struct, frozen=True):
    content_type: str
    text: str


def expose(
    metrics: Metrics, gauges: Gauges, *, accept: str = "", vllm: VllmNames | None = None
) -> Exposition:
    """accept: the request's Accept header; vllm: adds vLLM's names"""
    own = families(metrics, gauges)
    if vllm is not None:
        return Exposition(TEXT, _text([*own, *vllm_families(metrics, gauges, vllm)]))
    if prefers_openmetrics(accept):
        return Exposition(OPENMETRICS, _openmetrics(own))
    return Exposition(TEXT, _text(own))


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header wants OpenMetrics at least as much as text/plain."""
    openmetrics = text = 0.0
    for part in accept.lower().split(","):
        media, *rest = (piece.strip() for piece in part.split(";"))
        parameters = dict(piece.split("=", 1) for piece in rest if "=" in piece)
        quality = _quality(parameters.get("q", "1"))
        if media == "application/openmetrics-text":
            if parameters.get("version", "").strip('"') in _OPENMETRICS_VERSIONS:
                openmetrics = max(openmetrics, quality)
        elif media in ("text/plain", "text/*"):
            text = max(text, quality)
    return openmetrics > 0 and openmetrics >= text


def _quality(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _text(all_families: Iterable[Family]) -> str:
    lines: list[str] = []
    for family in all_families:
        name = family.name + ("_total" if family.kind == "counter" else "")
        lines.append(f"# HELP {name} {family.meaning}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines += [head + repr(value) for head, value, _ in family.samples]
    lines.append("")
    return "\n".join(lines)


def _openmetrics(all_families: Iterable[Family]) -> str:
    lines: list[str] = []
    for family in all_families:
        lines.append(f"# HELP {family.name} {family.meaning}")
        lines.append(f"# TYPE {family.name} {family.kind}")
        lines += [
            head + repr(value) + (_exemplar(exemplar) if exemplar else "")
            for head, value, exemplar in family.samples
        ]
    lines.append("# EOF\n")
    return "\n".join(lines)


def _exemplar(exemplar: Exemplar) -> str:
    trace_id, value, at = exemplar
    return f' # {{trace_id="{trace_id}"}} {value!r} {at:.3f}'
