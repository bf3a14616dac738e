"""What a request may say about speculation, and what it means."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.admission import Limits, make_requests
from specserve.config import EngineConfig
from specserve.errors import RequestError
from specserve.types import Request, SamplingParams, Speculation
from tests.http_server import a_server
from tests.scripted import says


def limits(*drafters: str, default: str = "auto") -> Limits:
    config = EngineConfig(default_drafter=default, default_draft_tokens=3, max_draft_tokens=9)
    return Limits.of(config, vocab_size=99, eos_ids=frozenset(), drafters=("none", *drafters))


def asked(known: Limits, **speculation: Any) -> Request:
    [request] = make_requests(
        known,
        [1, 2],
        SamplingParams(max_tokens=4),
        request_id="r",
        speculation=Speculation(**speculation),
    )
    return request


def test_auto_is_the_default_and_k_is_then_the_most_it_may_be() -> None:
    request = asked(limits("suffix", "ngram"))
    assert (request.drafter, request.max_draft_tokens) == ("auto", 9)
    request = asked(limits("suffix"), max_draft_tokens=2)
    assert (request.drafter, request.max_draft_tokens) == ("auto", 2)


def test_a_named_drafter_is_taken_at_its_word() -> None:
    request = asked(limits("suffix", "ngram"), drafter="ngram", draft_width=4)
    assert (request.drafter, request.max_draft_tokens, request.draft_width) == ("ngram", 3, 4)


@pytest.mark.parametrize(
    ("known", "speculation", "param"),
    [
        (limits(default="none"), {"drafter": "auto"}, "speculation.drafter"),
        (limits("ngram"), {"draft_width": 3}, "speculation.draft_width"),
        (limits("ngram"), {"drafter": "ngram", "draft_width": 0}, "speculation.draft_width"),
        (limits("ngram"), {"drafter": "ngram", "draft_width": 99}, "speculation.draft_width"),
        (limits("ngram"), {"max_draft_tokens": 10}, "speculation.max_draft_tokens"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    known: Limits, speculation: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        asked(known, **speculation)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "content", ["hello there", [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]]
)
async def test_a_predicted_output_changes_no_text(content: object) -> None:
    async with a_server(says("hello world")) as server:
        reply = await server.chat(prediction={"type": "content", "content": content})
    assert reply.json()["choices"][0]["message"]["content"] == "hello world"


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content[0]"),
        ({"type": "other", "content": "a"}, "prediction.type"),
    ],
)
async def test_a_prediction_that_is_no_text_is_refused(prediction: object, param: str) -> None:
    async with a_server(says("hi")) as server:
        reply = await server.chat(prediction=prediction)
    assert (reply.status, reply.error["param"]) == (400, param)
