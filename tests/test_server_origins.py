"""return_token_origins: whose each token is, what else was guessed, and nothing unless asked."""

from __future__ import annotations

from typing import Any  # decoded JSON

import pytest

from specserve.drafting import Draft
from specserve.server.origins import OriginReader
from specserve.types import Guesses, StepTrace, TokenChunk
from tests.http_server import Server, a_server
from tests.scripted import END, byte_tokenizer, says

pytestmark = pytest.mark.timeout(60)

TEXT = "the cat sat, então 🦉!"


def steps_of(events: list[Any]) -> list[Any]:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return [step for choice in choices for step in choice.get("token_origins", [])]


async def steps_with(server: Server, drafter: str, k: int, **more: object) -> list[Any]:
    reply = await server.chat(
        stream=True,
        return_token_origins=True,
        speculation={"drafter": drafter, "max_draft_tokens": k},
        **more,
    )
    assert reply.status == 200, reply.body
    steps = steps_of(reply.events)
    # What every reply of these must hold, whoever guesses.
    assert [step["step"] for step in steps] == list(range(len(steps)))
    for step in steps:
        accepted = [one for one in step["tokens"] if one["origin"] == "accepted"]
        assert step["accepted"] == len(accepted)
        assert [one["position"] for one in accepted] == list(range(len(accepted)))
        assert step["tokens"][: len(accepted)] == accepted
        assert len(step["tokens"]) - len(accepted) <= 1
    metrics = reply.events[-2]["metrics"]
    assert (
        sum(step["accepted"] for step in steps)
        == (metrics["speculative_decoding"]["num_accepted_draft_tokens"])
    )
    assert (
        sum(step["drafted"] for step in steps)
        == (metrics["speculative_decoding"]["num_draft_tokens"])
    )
    assert len(steps) == metrics["specserve"]["steps"]
    return steps


def tokens_of(steps: list[Any]) -> list[Any]:
    return [token for step in steps for token in step["tokens"]]


def origins_of(steps: list[Any]) -> list[list[str]]:
    return [[token["origin"] for token in step["tokens"]] for step in steps]


async def test_a_drafter_that_is_right_two_times_shows_what_was_corrected() -> None:
    async with a_server(says("abcdefgh")) as server:
        steps = await steps_with(server, "part", 3)
    assert origins_of(steps) == [
        ["plain"],  # the prompt's own step
        ["accepted", "accepted", "corrected"],
        ["accepted", "accepted", "corrected"],
        ["accepted", "accepted"],  # the second is the end, what follows it is trimmed
    ]
    assert [step["drafter"] for step in steps] == ["none", "part", "part", "part"]
    assert steps[0]["reason"] == "prefill"
    assert "reason" not in steps[1]
    [wrong] = steps[1]["rejected"]
    assert wrong == {"id": ord("e"), "text": "e", "position": 2}  # the guesser says one too many
    assert steps[1]["tokens"][2]["text"] == "d"


async def test_guesses_that_are_all_right_earn_a_bonus_and_none_are_rejected() -> None:
    async with a_server(says("abcdefgh")) as server:
        steps = await steps_with(server, "oracle", 2)
    assert origins_of(steps)[1:3] == [["accepted", "accepted", "bonus"]] * 2
    assert not any(step["rejected"] for step in steps)


async def test_guesses_that_are_all_wrong_are_shown_and_change_no_token() -> None:
    async with a_server(says("abc")) as server:
        wrong = await steps_with(server, "anti", 2)
        plain = await steps_with(server, "none", 0)
    assert origins_of(wrong) == [["plain"], ["corrected"], ["corrected"], ["corrected"]]
    assert [guess["position"] for guess in wrong[1]["rejected"]] == [0, 1]
    assert origins_of(plain) == [["plain"]] * 4
    assert all(step["drafted"] == 0 and step["rejected"] == [] for step in plain)
    assert [one["id"] for one in tokens_of(wrong)] == [one["id"] for one in tokens_of(plain)]


@pytest.mark.parametrize("drafter", ["oracle", "part", "anti", "none"])
async def test_the_tokens_texts_join_to_the_text_whole_or_streamed(drafter: str) -> None:
    speculation = {"drafter": drafter, "max_draft_tokens": 3}
    async with a_server(says(TEXT)) as server:
        steps = await steps_with(server, drafter, 3)
        whole = await server.chat(return_token_origins=True, speculation=speculation)
        completion = await server.complete(
            return_token_origins=True, speculation=speculation, max_tokens=99
        )
    assert "".join(one["text"] for one in tokens_of(steps)) == TEXT
    [choice] = whole.json()["choices"]
    assert choice["message"]["content"] == TEXT
    assert choice["token_origins"] == steps
    [choice] = completion.json()["choices"]
    assert "".join(one["text"] for one in tokens_of(choice["token_origins"])) == TEXT


async def test_a_text_that_ends_inside_a_character_joins_to_the_same_text_too() -> None:
    async with a_server(says(TEXT)) as server:
        for max_tokens in range(1, len(TEXT.encode())):
            reply = await server.chat(return_token_origins=True, max_tokens=max_tokens)
            [choice] = reply.json()["choices"]
            text = "".join(one["text"] for one in tokens_of(choice["token_origins"]))
            assert text == choice["message"]["content"]
            assert len(tokens_of(choice["token_origins"])) == max_tokens


async def test_each_of_n_choices_has_its_own_steps() -> None:
    async with a_server(says(TEXT)) as server:
        reply = await server.chat(n=3, return_token_origins=True)
    for choice in reply.json()["choices"]:
        steps = choice["token_origins"]
        assert [step["step"] for step in steps] == list(range(len(steps)))
        assert "".join(one["text"] for one in tokens_of(steps)) == TEXT


@pytest.mark.parametrize("stream", [False, True])
async def test_nobody_who_did_not_ask_is_told(stream: bool) -> None:
    async with a_server(says(TEXT)) as server:
        for reply in (await server.chat(stream=stream), await server.complete(stream=stream)):
            assert b"token_origins" not in reply.body


def a_tree() -> Guesses:
    """a(b(d), c), scores by letter."""
    draft = Draft(
        token_ids=(97, 98, 99, 100), parents=(-1, 0, 0, 1), scores=(0.9, 0.5, 0.25, 0.125)
    )
    return Guesses(draft.token_ids, draft.parents, draft.scores, (0, 2))


def test_of_a_tree_the_path_is_accepted_and_the_rest_keeps_its_depth() -> None:
    guesses = a_tree()
    trace = StepTrace(
        step_idx=4, num_tokens=3, num_accepted=2, drafter="tree", reason="", guesses=guesses
    )
    chunk = TokenChunk(request_id="r", token_ids=(97, 99, 120), steps=(trace,))
    reader = OriginReader(byte_tokenizer(), skip_special_tokens=True)
    [step] = reader.read(chunk)
    assert [(one.text, one.origin) for one in step.tokens] == [
        ("a", "accepted"),
        ("c", "accepted"),
        ("x", "bonus"),  # nothing was guessed behind c
    ]
    assert [one.probability for one in step.tokens[:2]] == [0.9, 0.25]
    assert [(one.text, one.position, one.probability) for one in step.rejected] == [
        ("b", 1, 0.5),
        ("d", 2, 0.125),
    ]


async def test_the_end_itself_is_a_token_without_text() -> None:
    async with a_server(says("ab")) as server:
        steps = await steps_with(server, "oracle", 2)
    assert tokens_of(steps)[-1] == {"id": END, "text": "", "origin": "accepted", "position": 1}
