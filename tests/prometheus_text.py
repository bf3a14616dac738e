"""A strict reader of what /metrics says, in both formats: anything odd is an AssertionError."""

from __future__ import annotations

import re

from specserve_observability.exposition import OPENMETRICS, expose
from specserve_observability.metrics import WAIT_REASONS, Gauges, Metrics
from specserve_observability.vllm_families import VllmNames

Key = tuple[str, frozenset[tuple[str, str]]]
Samples = dict[Key, float]

_NAME = r"[a-zA-Z_][a-zA-Z0-9_]*"  # stricter than the format: no colons
_VLLM_NAME = rf"vllm:{_NAME}"
_LABEL = re.compile(rf'({_NAME})="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')
_SUFFIXES = {"gauge": {""}, "counter": {"_total"}, "histogram": {"_bucket", "_sum", "_count"}}
_EXEMPLAR = re.compile(r' # \{trace_id="([0-9a-f]{32})"\} (\S+) (\d+\.\d{3})')


def no_load(**changes: object) -> Gauges:
    given: dict[str, object] = {
        "num_running": 0,
        "waiting": dict.fromkeys(WAIT_REASONS, 0),
        "blocks_free": 0,
        "blocks_cached": 0,
        "blocks_live": 0,
        "engine_up": True,
    }
    return Gauges(**(given | changes))  # type: ignore[arg-type]  # each value is its field's


class PrometheusText:
    """One scrape. types: by family, as its TYPE line names it.

    exemplars: (trace id, value, seconds since the epoch)
    """

    def __init__(self, text: str, *, openmetrics: bool = False, colons: bool = False) -> None:
        if openmetrics:
            assert text.endswith("\n# EOF\n")
            text = text.removesuffix("# EOF\n")
        assert text.endswith("\n")
        self.types: dict[str, str] = {}
        self.samples: Samples = {}
        self.exemplars: dict[Key, tuple[str, float, float]] = {}
        self._openmetrics = openmetrics
        self._name = f"{_VLLM_NAME}|{_NAME}" if colons else _NAME
        self._line = re.compile(rf"({self._name})(?:\{{(.*?)\}})? (\S+)( # .*)?")
        family = ""
        for line in text.removesuffix("\n").split("\n"):
            if line.startswith("# HELP "):
                family = line.split(" ")[2]
                assert family not in self.types, f"{family} appears twice"
                assert re.fullmatch(self._name, family)
                assert len(line.split(" ", 3)[3]) > 3
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                assert name == family
                self.types[name] = kind
            else:
                self._sample(line, family)

    def _sample(self, line: str, family: str) -> None:
        match = self._line.fullmatch(line)
        assert match, line
        name, label_text, value, exemplar = match.groups()
        kind = self.types[family]
        allowed = _SUFFIXES[kind]
        if kind == "counter" and not self._openmetrics:  # there the family has the whole name
            allowed = {""}
            assert family.endswith("_total")
        assert name.removeprefix(family) in allowed, line
        labels = _LABEL.findall(label_text or "")
        assert "".join(f'{k}="{v}",' for k, v in labels).rstrip(",") == (label_text or "")
        key = (name, frozenset(labels))
        assert key not in self.samples, f"{line} appears twice"
        self.samples[key] = float(value)
        if exemplar is not None:
            assert self._openmetrics, line
            found = _EXEMPLAR.fullmatch(exemplar)
            assert found, line
            self.exemplars[key] = (found[1], float(found[2]), float(found[3]))

    def get(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def total(self, name: str, **labels: str) -> float:
        """Over all series that have these labels."""
        wanted = labels.items()
        found = [v for (n, own), v in self.samples.items() if n == name and wanted <= own]
        assert found, f"{name} {labels}"
        return sum(found)

    def monotonic(self) -> Samples:
        """Every sample that may never go down."""
        gauges = {name for name, kind in self.types.items() if kind == "gauge"}
        return {key: value for key, value in self.samples.items() if key[0] not in gauges}


def scrape(metrics: Metrics, gauges: Gauges | None = None) -> PrometheusText:
    return PrometheusText(expose(metrics, gauges or no_load()).text)


def scrape_openmetrics(metrics: Metrics, gauges: Gauges | None = None) -> PrometheusText:
    page = expose(metrics, gauges or no_load(), accept="application/openmetrics-text")
    assert page.content_type == OPENMETRICS
    return PrometheusText(page.text, openmetrics=True)


def scrape_vllm(metrics: Metrics, gauges: Gauges | None = None) -> PrometheusText:
    page = expose(metrics, gauges or no_load(), vllm=VllmNames("demo", 16))
    return PrometheusText(page.text, colons=True)
