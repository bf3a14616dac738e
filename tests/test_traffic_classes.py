"""Whose requests metrics tell apart: by key, by header, and never by what a client makes up."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.errors import ConfigError
from specserve.operation import settings_of
from specserve.options import ServeOptions
from specserve.server.keys import KeyRing, read_keys
from specserve.server.state import ServerSettings
from specserve.server.traffic import MAX_CLASSES, TrafficClasses
from specserve_observability.metrics import Metrics
from specserve_observability.recorder import Recorder
from tests.http_server import Server, a_server
from tests.prometheus_text import scrape
from tests.scripted import says
from tests.trace_records import a_request

KEYS = ("the-key-of-the-nightly-batch", "the-key-of-everybody-else")


async def class_of(server: Server, **headers: str) -> str:
    """The traffic class that one request with these headers is recorded in."""
    reply = await server.post(
        "/v1/completions",
        {"prompt": "say:", "temperature": 0},
        {name.replace("_", "-"): value for name, value in headers.items()},
    )
    assert reply.status == 200
    return server.recorder.requests[-1].traffic_class


async def test_a_header_names_its_class_and_what_nobody_announced_is_other() -> None:
    settings = ServerSettings(traffic_classes=TrafficClasses(("batch", "chat")))
    async with a_server(says("hello"), settings=settings) as server:
        assert await class_of(server) == "default"
        assert await class_of(server, x_traffic_class="batch") == "batch"
        assert await class_of(server, X_Traffic_Class=" Chat ") == "chat"
        assert await class_of(server, x_traffic_class="default") == "default"
        assert await class_of(server, x_traffic_class="somebody-made-this-up") == "other"
        assert await class_of(server, x_traffic_class='"}\tx') == "other"


async def test_a_server_without_classes_does_not_read_the_header() -> None:
    async with a_server(says("hello")) as server:
        assert await class_of(server, x_traffic_class="batch") == "default"


async def test_a_keys_class_comes_before_what_the_request_says() -> None:
    settings = ServerSettings(
        keys=KeyRing(KEYS, {KEYS[0]: "batch"}), traffic_classes=TrafficClasses(("batch", "chat"))
    )
    async with a_server(says("hello"), settings=settings) as server:
        batch, other = (f"Bearer {key}" for key in KEYS)
        assert await class_of(server, authorization=batch) == "batch"
        assert await class_of(server, authorization=batch, x_traffic_class="chat") == "batch"
        assert await class_of(server, authorization=other, x_traffic_class="chat") == "chat"
        assert await class_of(server, authorization=other) == "default"


def test_every_announced_class_has_its_own_series_and_no_other_ever_appears() -> None:
    recorder = Recorder(Metrics(traffic_classes=["batch"]))
    for name in ("batch", "default", "unheard-of", "batch"):
        recorder.record_request(a_request(0, traffic_class=name))
    text = scrape(recorder.metrics)
    finished = "specserve_requests_finished_total"
    counted = {
        name: text.total(finished, traffic_class=name) for name in ("default", "batch", "other")
    }
    assert counted == {"default": 1, "batch": 2, "other": 1}
    assert text.total(finished) == 4


def test_without_classes_all_is_default() -> None:
    recorder = Recorder()
    recorder.record_request(a_request(0, traffic_class="unheard-of"))
    text = scrape(recorder.metrics)
    assert text.total("specserve_requests_finished_total", traffic_class="default") == 1


def a_key_file(folder: Path, *lines: str) -> str:
    (folder / "keys").write_text("\n".join(lines))
    return str(folder / "keys")


def test_a_key_files_classes_are_announced_beside_the_options(tmp_path: Path) -> None:
    file = a_key_file(tmp_path, f"  {KEYS[0]}   class=batch ", KEYS[1], "")
    options = ServeOptions(api_key_file=file, traffic_classes="chat, batch,default")
    settings = settings_of(options, {})
    assert settings.traffic_classes.names == ("chat", "batch")
    assert settings.keys is not None
    assert [settings.keys.class_of(idx) for idx in range(2)] == ["batch", None]


@pytest.mark.parametrize("name", ["", "Batch", "a" * 33, "other", "-x", "ü", KEYS[0].upper()])
def test_a_bad_class_in_a_key_file_is_named_by_its_line_and_not_shown(
    name: str, tmp_path: Path
) -> None:
    file = a_key_file(tmp_path, KEYS[1], f"{KEYS[0]} class={name}")
    with pytest.raises(ConfigError, match="line 2: the name of a traffic class is 1 to 32") as told:
        read_keys(file, None)
    assert not name or name in ("other", "-x") or name not in str(told.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("Batch", "--traffic-classes has 'Batch': the name"),
        ("a,,b", "--traffic-classes has ''"),
        ("other", "not 'other'"),
        (
            ",".join(f"c{idx}" for idx in range(MAX_CLASSES + 1)),
            "17 traffic classes, the limit is 16",
        ),
    ],
)
def test_bad_options_are_named(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrafficClasses.parse(given)
