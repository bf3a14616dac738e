"""A real Prometheus scrapes a real server: what our dashboard, alerts and vLLM's users will see.

The model is tiny and random; everything else is what a user runs.
"""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any  # decoded JSON

import msgspec
import pytest

from tests.prometheus_server import Prometheus, program, promtool, scraping
from tests.prometheus_text import PrometheusText
from tests.serve_command import Server, start
from tests.training_world import a_target

OBSERVABILITY = Path(__file__).parent.parent / "observability"
DASHBOARD = OBSERVABILITY / "grafana" / "specserve.json"
RULES = OBSERVABILITY / "prometheus" / "specserve.rules.yml"
VARIABLES = {"$__rate_interval": "5m", "$job": ".*", "$instance": ".*", "$traffic_class": ".*"}


class World(msgspec.Struct):
    """The same load on a server with our names alone, and on one with vLLM's, too."""

    plain: Server
    compat: Server
    prometheus: Prometheus
    replies: list[dict[str, Any]]  # of each server
    scrapes: list[PrometheusText]  # of `plain`, before, during and after the load


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    program("prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    model = folder / "model"
    model.mkdir()
    a_target(model)
    options = [*("--model", str(model), "--backend", "cpu", "--dtype", "fp32", "--threads", "1")]
    options += ["--drafters", "suffix,ngram", "--kv-cache-gb", "0.05", "--speculation", "fixed"]
    options += ["--served-model-name", "tiny", "--traffic-classes", "batch"]
    folders = [folder / name for name in ("plain", "compat")]
    for own in folders:
        own.mkdir()
    with ThreadPoolExecutor(2) as threads:
        starting = [
            threads.submit(start, folders[0], *options),
            threads.submit(start, folders[1], *options, "--metrics-compat", "vllm"),
        ]
        plain, compat = (one.result() for one in starting)
    try:
        addresses = [server.url.removeprefix("http://") for server in (plain, compat)]
        with scraping(folder, {"specserve": addresses[0], "vllm": addresses[1]}) as prometheus:
            yield _under_load(plain, compat, prometheus)
    finally:
        plain.kill()
        compat.kill()


def _under_load(plain: Server, compat: Server, prometheus: Prometheus) -> World:
    # Series at 0 first, so that rates see every step of theirs.
    prometheus.has("sum(specserve_engine_up)", lambda value: value == 2)
    scrapes = [scrape(plain)]
    replies = []
    for _ in range(2):
        with ThreadPoolExecutor(4) as threads:
            replies += list(threads.map(lambda idx: generate(plain, idx), range(12)))
            list(threads.map(lambda idx: generate(compat, idx), range(12)))
        scrapes.append(scrape(plain))
    finished = 'sum(specserve_requests_finished_total{job="%s"})'
    for job in ("specserve", "vllm"):
        prometheus.has(finished % job, lambda value: value == len(replies))
    return World(plain, compat, prometheus, replies, scrapes)


def generate(server: Server, idx: int) -> dict[str, Any]:
    body = {
        "prompt": " ".join(f"w{3 + (idx * 7 + at % 5) % 60}" for at in range(10 + 3 * idx)),
        "max_tokens": 20 + idx,
        "temperature": 0,
        "ignore_eos": idx % 3 > 0,
    }
    headers = {"content-type": "application/json"}
    if idx % 2:
        headers["x-traffic-class"] = "batch"
    asked = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(asked, timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def page(server: Server, accept: str = "text/plain") -> str:
    asked = urllib.request.Request(f"{server.url}/metrics", headers={"accept": accept})
    with urllib.request.urlopen(asked, timeout=60) as reply:
        text: str = reply.read().decode()
    return text


def scrape(server: Server) -> PrometheusText:
    return PrometheusText(page(server))


def expressions() -> dict[str, str]:
    """Every query of the dashboard with its variables filled in, by panel and letter."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression = target["expr"]
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            assert "$" not in expression, expression
            found[f"{panel['title']} {target['refId']}"] = expression
    return found


def test_every_query_of_the_dashboard_returns_data(world: World) -> None:
    asked = expressions()
    assert len(asked) > 50
    empty = [name for name, expression in asked.items() if not world.prometheus.query(expression)]
    assert not empty
    rates = {name: e for name, e in asked.items() if "rate" in name.lower() or "hits" in name}
    for name, expression in rates.items():
        assert all(0 <= value <= 1 for value in world.prometheus.query(expression).values()), name
    # The dashboard's choices are filled from series that exist.
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        found = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["definition"])
        assert found, variable["definition"]
        metric, label = found.groups()
        values = world.prometheus.ask(f"label/{label}/values", **{"match[]": metric})
        assert values, variable["name"]


def test_promtool_finds_nothing_to_say_about_our_metrics(world: World) -> None:
    assert promtool("check", "metrics", text=page(world.plain)) == ""


def test_counters_only_grow_and_agree_with_what_the_replies_said(world: World) -> None:
    for before, after in zip(world.scrapes, world.scrapes[1:], strict=False):
        later = after.monotonic()
        assert later.keys() == before.monotonic().keys()
        assert all(later[key] >= value for key, value in before.monotonic().items())
    now = world.scrapes[-1]
    usages = [reply["usage"] for reply in world.replies]
    specs = [reply["metrics"]["speculative_decoding"] for reply in world.replies]
    for name, total in (
        ("generated_tokens_total", sum(usage["completion_tokens"] for usage in usages)),
        ("request_output_tokens_sum", sum(usage["completion_tokens"] for usage in usages)),
        ("prompt_tokens_total", sum(usage["prompt_tokens"] for usage in usages)),
        (
            "prefix_cached_tokens_total",
            sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages),
        ),
        ("requests_finished_total", len(usages)),
        ("spec_steps_total", sum(spec["num_spec_steps"] for spec in specs)),
        ("spec_draft_tokens_total", sum(spec["num_draft_tokens"] for spec in specs)),
        ("row_draft_tokens_sum", sum(spec["num_draft_tokens"] for spec in specs)),
        ("spec_accepted_tokens_total", sum(spec["num_accepted_draft_tokens"] for spec in specs)),
        ("spec_accepted_at_position_total", sum(s["num_accepted_draft_tokens"] for s in specs)),
    ):
        assert now.total(f"specserve_{name}") == total > 0, name
    classes = {
        name: now.total("specserve_requests_finished_total", traffic_class=name)
        for name in ("default", "batch", "other")
    }
    assert classes == {"default": 12, "batch": 12, "other": 0}


def test_a_latency_leads_to_its_trace(world: World) -> None:
    """The exemplars that Prometheus stored name traces that the server wrote to its file."""
    asked = page(world.plain, "application/openmetrics-text;version=1.0.0")
    assert PrometheusText(asked, openmetrics=True).exemplars
    now = time.time()
    stored = world.prometheus.ask(
        "query_exemplars",
        query='specserve_time_to_first_token_seconds_bucket{job="specserve"}',
        start=str(now - 600),
        end=str(now + 60),
    )
    ids = {one["labels"]["trace_id"] for series in stored for one in series["exemplars"]}
    assert ids
    deadline = time.monotonic() + 60  # spans are written in batches
    while missing := {one for one in ids if one not in world.plain.trace_file.read_text()}:
        assert time.monotonic() < deadline, missing
        time.sleep(0.1)


def test_prometheus_finds_vllms_names(world: World) -> None:
    ask = world.prometheus.value
    labels = 'model_name="tiny", engine="0", job="vllm"'
    for name in (
        "generation_tokens_total",
        "prompt_tokens_total",
        "spec_decode_num_drafts_total",
        "spec_decode_num_draft_tokens_total",
        "spec_decode_num_accepted_tokens_total",
        "e2e_request_latency_seconds_count",
    ):
        assert ask(f"vllm:{name}{{{labels}}}") > 0, name
    rate = "sum(rate(vllm:spec_decode_num_accepted_tokens_per_pos_total[5m])) by (position)"
    assert len(world.prometheus.query(rate)) == 15
    assert ask(f"vllm:kv_cache_usage_perc{{{labels}}}") == 0
    assert ask('vllm:generation_tokens_total{job="vllm"}') == ask(
        'specserve_generated_tokens_total{job="vllm"}'
    )


def test_the_alerts_go_off_when_they_should_and_only_then(tmp_path: Path) -> None:
    promtool("check", "rules", str(RULES))
    labels = '{job="j", instance="%s"}'
    series = []
    for instance, plain in (("good", 150), ("bad", 90)):
        for name, step in (("", 100), ("_plain", plain)):
            series.append(
                {
                    "series": f"specserve_decode_step{name}_seconds_total{labels % instance}",
                    "values": f"0+{step}x40",
                }
            )
    up = [{"series": "specserve_engine_up" + labels % "dead", "values": "1x9 0x30"}]
    costs = {"severity": "warning", "job": "j", "instance": "bad"}
    dead = {"severity": "critical", "job": "j", "instance": "dead"}

    def alerts(at: str, name: str, *who: dict[str, str]) -> dict[str, Any]:
        return {
            "eval_time": at,
            "alertname": name,
            "exp_alerts": [{"exp_labels": one, "exp_annotations": TEXTS[name]} for one in who],
        }

    test = {
        "interval": "1m",
        "input_series": series + up,
        "alert_rule_test": [
            alerts("9m", "SpecserveSpeculationCosts"),
            alerts("25m", "SpecserveSpeculationCosts", costs),
            alerts("9m", "SpecserveEngineDown"),
            alerts("15m", "SpecserveEngineDown", dead),
            alerts("25m", "SpecserveDrafterFails"),
        ],
    }
    file = tmp_path / "alerts.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "tests": [test]}))
    promtool("test", "rules", str(file))


TEXTS = {
    "SpecserveSpeculationCosts": {
        "summary": "bad decodes at 90% of what it would without speculation",
        "description": "Look at acceptance by drafter; --speculation off, or fewer --drafters, "
        "loses nothing of the text.",
    },
    "SpecserveEngineDown": {
        "summary": "the engine of dead has failed: its log says why, and only a restart helps"
    },
    "SpecserveDrafterFails": {},
}
