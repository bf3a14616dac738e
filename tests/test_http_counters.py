"""Requests by route and outcome, refused ones too, and no series that a client could make up."""

from __future__ import annotations

from specserve.server.app import ROUTES
from specserve.server.state import STATE
from specserve_observability.http_counters import OUTCOMES, HttpCounters
from specserve_observability.metrics import Metrics
from tests.http_server import a_server
from tests.prometheus_text import scrape
from tests.scripted import says


def nonzero(http: HttpCounters) -> dict[tuple[str, str], int]:
    return {
        (route, code): count
        for route, counts in http.by_route.items()
        for code, count in counts.items()
        if count
    }


async def test_every_answer_counts_once_by_its_route_and_status() -> None:
    async with a_server(says("hello")) as server:
        assert (await server.complete()).status == 200
        assert (await server.complete(temperature=9)).status == 400
        assert (await server.get("/v1/models/nobody")).status == 404
        assert (await server.get("/made/up/by/a/client")).status == 404
        assert (await server.post("/health", {})).status == 405
        assert (await server.get("/")).status == 200
        http = server.app[STATE].http
        assert nonzero(http) == {
            ("/v1/completions", "2xx"): 1,
            ("/v1/completions", "4xx"): 1,
            ("/v1/models/{id}", "4xx"): 1,
            ("other", "4xx"): 2,
            ("other", "2xx"): 1,
        }
        assert http.by_route.keys() == {path for _, path in ROUTES} | {"other"}


def test_odd_statuses_have_their_own_place_and_none_makes_a_new_one() -> None:
    http = Metrics().http
    http.announce(["/a"])
    for status in (200, 204, 302, 400, 429, 499, 500, 503, 101, 999):
        http.add("/a", status)
    assert tuple(http.by_route["/a"]) == OUTCOMES
    assert nonzero(http) == {
        ("/a", "2xx"): 3,
        ("/a", "3xx"): 1,
        ("/a", "4xx"): 1,
        ("/a", "429"): 1,
        ("/a", "499"): 1,
        ("/a", "5xx"): 3,
    }


def test_counts_are_scraped_and_begin_at_zero() -> None:
    metrics = Metrics()
    metrics.http.announce(["/v1/completions"])
    name = "specserve_http_requests_total"
    assert scrape(metrics).get(name, route="/v1/completions", code="429") == 0
    metrics.http.add("/v1/completions", 429)
    assert scrape(metrics).get(name, route="/v1/completions", code="429") == 1
