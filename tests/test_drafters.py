"""What every drafter promises, over the dict of drafters, and what each of them is for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from specserve.drafting import NO_DRAFT, Draft, Drafter, DraftRow, Observer, Outcome, chain
from specserve.errors import ConfigError
from specserve.types import Request
from specserve_drafts import DRAFTERS, DrafterResources, parse_drafter_spec, recorded
from specserve_drafts.draft_model import DraftModelDrafter
from tests.eagle3_reference import specforge
from tests.head_checkpoints import V, target_parts
from tests.logit_rows import a_sampling_request
from tests.scripted import VOCAB_SIZE, ScriptedModel
from tests.test_medusa import medusa, mlp_speculator

BLOCK = 4
NUM_BLOCKS = 64
PROMPT = (1, 2, 3, 1, 2, 3, 1)
OUTPUT = (2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1)
ARGUMENTS = {"synthetic": "0.5"}
READ_HIDDEN_STATES = ("eagle3", "medusa", "mlp_speculator")  # their tiny target has V tokens


def counts_up(history: Seq[int]) -> int:
    """The draft model's script: after each token, the next in a cycle of three."""
    return history[-1] % 3 + 1


def resources(name: str = "", **changes: Any) -> DrafterResources:
    given: dict[str, Any] = {
        "argument": ARGUMENTS.get(name),
        "vocab_size": V if name in READ_HIDDEN_STATES else VOCAB_SIZE,
        "num_blocks": NUM_BLOCKS,
        "block_size": BLOCK,
        "model": ScriptedModel(counts_up),
        "target": target_parts(),
        "truth": recorded({PROMPT: OUTPUT}),
        "script": lambda row: Draft(token_ids=(7, 8, 9, 9), parents=(-1, -1, 0, 2)),
    }
    return DrafterResources(**(given | changes))


def a_drafter(name: str, **changes: Any) -> Drafter:
    return DRAFTERS[name](resources(name, **changes))


def a_draft_row(
    history: Seq[int] = PROMPT,
    *,
    seq_id: int = 0,
    max_tokens: int = 4,
    num_known: int | None = None,
    kv_len: int = 0,
    request: Request | None = None,
) -> DraftRow:
    """A row with every fourth block of the pool, from block seq_id on."""
    return DraftRow(
        seq_id=seq_id,
        request=request or a_sampling_request(PROMPT, temperature=0.0),
        history=history,
        num_known=len(history) if num_known is None else num_known,
        max_tokens=max_tokens,
        kv_len=kv_len,
        block_table=tuple(range(seq_id, NUM_BLOCKS, 4)),
    )


def an_outcome(
    history: Seq[int], *, seq_id: int = 0, emitted: Seq[int] = (), drafter: str
) -> Outcome:
    """A decode step that computed the last token of history and accepted all of emitted but one."""
    return Outcome(
        seq_id=seq_id,
        request=a_sampling_request(PROMPT, temperature=0.0),
        start=len(history) - 1,
        token_ids=(history[-1], *emitted),
        num_computed=len(emitted),
        drafter=drafter,
        num_drafted=len(emitted) - 1,
        num_accepted=len(emitted) - 1,
    )


# --- what every drafter promises -----------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of the drafters that are files."""
    build = {"eagle3": specforge, "medusa": medusa, "mlp_speculator": mlp_speculator}
    for name, checkpoint in build.items():
        ARGUMENTS[name] = checkpoint(tmp_path_factory.mktemp(name))
    pard = tmp_path_factory.mktemp("pard")
    (pard / "config.json").write_text('{"model_type": "llama", "pard_token": 0}')
    ARGUMENTS["pard"] = str(pard)


@pytest.fixture(params=DRAFTERS)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return a_drafter(request.param)


def test_a_drafter_is_called_what_the_dict_calls_it() -> None:
    assert {name: a_drafter(name).name for name in DRAFTERS} == {name: name for name in DRAFTERS}


def test_no_rows_no_drafts(drafter: Drafter) -> None:
    assert drafter.propose([]) == []


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_drafts_come_in_order_within_k_and_parents_come_first(
    drafter: Drafter, max_tokens: int
) -> None:
    rows = [a_draft_row(seq_id=idx, max_tokens=max_tokens - idx % 2) for idx in range(3)]
    drafts = drafter.propose(rows)
    assert len(drafts) == 3
    for row, draft in zip(rows, drafts, strict=True):
        assert len(draft.token_ids) <= row.max_tokens
        assert len(draft.parents) == len(draft.token_ids)
        assert all(-1 <= parent < idx for idx, parent in enumerate(draft.parents))
        assert all(0 <= token < VOCAB_SIZE for token in draft.token_ids)
        assert 0 <= draft.kv_len <= len(row.history)


def test_nothing_is_guessed_when_no_guess_is_wanted(drafter: Drafter) -> None:
    (draft,) = drafter.propose([a_draft_row(max_tokens=0)])
    assert draft.token_ids == ()


def test_nothing_is_guessed_in_the_middle_of_a_prompt(drafter: Drafter) -> None:
    (draft,) = drafter.propose([a_draft_row(num_known=4)])
    assert draft.token_ids == ()
    assert draft.kv_len <= 4


def test_a_row_is_guessed_the_same_alone_and_with_neighbours(drafter: Drafter) -> None:
    rows = [a_draft_row(PROMPT + OUTPUT[:idx], seq_id=idx, max_tokens=1 + idx) for idx in range(4)]
    together = drafter.propose(rows)
    for row in rows:
        drafter.forget(row.seq_id)
    assert [drafter.propose([row])[0] for row in rows] == together


def test_a_forgotten_sequence_is_guessed_again_from_its_history(drafter: Drafter) -> None:
    (before,) = drafter.propose([a_draft_row()])
    if isinstance(drafter, Observer):
        drafter.observe([an_outcome(PROMPT, emitted=[2, 3], drafter=drafter.name)])
    drafter.forget(0)
    drafter.forget(0)
    drafter.forget(99)
    assert drafter.propose([a_draft_row()]) == [before]


def test_the_history_is_only_read(drafter: Drafter) -> None:
    history = list(PROMPT)
    drafter.propose([a_draft_row(history)])
    assert history == list(PROMPT)


def test_two_drafters_made_alike_guess_alike(drafter: Drafter) -> None:
    rows = [a_draft_row(PROMPT + OUTPUT[:idx], seq_id=idx) for idx in range(3)]
    assert drafter.propose(rows) == a_drafter(drafter.name).propose(rows)


# --- prompt lookup -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([1, 2, 3, 4], []),
        ([5, 6, 7, 8, 5], [6, 7, 8]),
        ([5, 6, 5, 7, 9, 5], [7, 9, 5]),  # the most recent of two
        ([1, 2, 3, 4, 9, 2, 3, 8, 1, 2, 3], [4, 9, 2]),  # three tokens beat two, though older
        ([4, 4], [4, 4, 4]),
        ([8, 1, 2, 1, 2], [1, 2, 1]),  # goes on repeating what repeats
        ([3], []),
    ],
)
def test_ngram_continues_the_longest_and_latest_match(
    history: list[int], expected: list[int]
) -> None:
    (draft,) = a_drafter("ngram").propose([a_draft_row(history, max_tokens=3)])
    assert list(draft.token_ids) == expected


def test_ngram_that_grew_with_the_text_knows_what_a_fresh_one_finds() -> None:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 4, (300,), generator=generator).tolist()
    grown = a_drafter("ngram")
    for end in range(1, len(text), 3):
        row = a_draft_row(text[:end], max_tokens=5)
        assert grown.propose([row]) == a_drafter("ngram").propose([row])


def test_ngram_keeps_sequences_apart() -> None:
    drafter = a_drafter("ngram")
    drafter.propose([a_draft_row([5, 6, 7, 5], seq_id=0)])
    (draft,) = drafter.propose([a_draft_row([1, 5], seq_id=1)])
    assert draft == NO_DRAFT


# --- drafters that know the truth -----------------------------------------------------------------


def test_the_oracle_is_right_to_the_end_of_what_it_knows() -> None:
    drafts = a_drafter("oracle").propose(
        [a_draft_row(PROMPT + OUTPUT[:done], seq_id=done) for done in (0, 5, 10, 12)]
    )
    assert [d.token_ids for d in drafts] == [OUTPUT[:4], OUTPUT[5:9], OUTPUT[10:], ()]


def test_its_opposite_is_never_right() -> None:
    for done in range(len(OUTPUT)):
        (draft,) = a_drafter("anti").propose([a_draft_row(PROMPT + OUTPUT[:done])])
        assert draft.token_ids
        for guess, right in zip(draft.token_ids, OUTPUT[done:], strict=False):
            assert guess != right


def test_who_knows_no_truth_of_a_prompt_guesses_nothing() -> None:
    for name in ("oracle", "anti", "synthetic"):
        (draft,) = a_drafter(name, truth=recorded({})).propose([a_draft_row()])
        assert draft == NO_DRAFT


def test_on_a_server_anti_is_sure_of_guesses_that_are_hardly_ever_right() -> None:
    drafter = a_drafter("anti", truth=None)
    drafts = drafter.propose([a_draft_row(max_tokens=4) for _ in range(500)])
    guesses = [guess for draft in drafts for guess in draft.token_ids]
    assert len(guesses) == 2000
    assert all(0 <= guess < VOCAB_SIZE for guess in guesses)
    assert len(set(guesses)) > 0.9 * VOCAB_SIZE
    assert all(min(draft.scores) > 0.9 for draft in drafts)
    chunk = a_draft_row([*PROMPT, 1, 2], num_known=2)
    assert drafter.propose([chunk]) == [NO_DRAFT]


def test_synthetic_is_right_at_its_rates_each_given_that_it_was_right_before() -> None:
    drafter = a_drafter("synthetic", argument="0.8,0.6")
    num_rows = 3000
    drafts = drafter.propose(
        [
            a_draft_row(seq_id=seed, max_tokens=3, request=a_sampling_request(PROMPT, seed=seed))
            for seed in range(num_rows)
        ]
    )
    alive = num_rows
    for idx, rate in enumerate((0.8, 0.6, 0.6)):
        right = sum(draft.token_ids[: idx + 1] == OUTPUT[: idx + 1] for draft in drafts)
        assert right / alive == pytest.approx(rate, abs=0.04)
        alive = right


def test_scripted_guesses_what_was_written_tree_and_all() -> None:
    (whole, part) = a_drafter("scripted").propose([a_draft_row(), a_draft_row(max_tokens=3)])
    assert (whole.token_ids, whole.parents) == ((7, 8, 9, 9), (-1, -1, 0, 2))
    assert (part.token_ids, part.parents) == ((7, 8, 9), (-1, -1, 0))


# --- a draft model's KV --------------------------------------------------------------------------


def test_a_draft_model_catches_up_within_its_limit_and_guesses_once_it_has() -> None:
    drafter = DraftModelDrafter(
        ScriptedModel(counts_up),
        vocab_size=VOCAB_SIZE,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        max_catch_up=3,
    )
    kv_len, seen = 0, []
    for _ in range(3):
        (draft,) = drafter.propose([a_draft_row(kv_len=kv_len)])
        kv_len = draft.kv_len
        seen.append((draft.token_ids, kv_len))
    assert seen == [((), 3), ((), 6), ((2, 3, 1, 2), 7)]


def test_a_row_far_behind_does_not_keep_its_neighbours_waiting() -> None:
    drafter = DraftModelDrafter(
        ScriptedModel(counts_up),
        vocab_size=VOCAB_SIZE,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        max_catch_up=9,
    )
    far, near = drafter.propose([a_draft_row(PROMPT * 3, seq_id=0), a_draft_row(seq_id=1)])
    assert (far.token_ids, far.kv_len) == ((), 2)
    assert (near.token_ids, near.kv_len) == ((2, 3, 1, 2), 7)


def test_a_draft_model_follows_a_chunked_prompt_without_guessing() -> None:
    drafter = a_drafter("draft_model")
    (first,) = drafter.propose([a_draft_row(num_known=4)])
    assert first == chain([], kv_len=4)
    (second,) = drafter.propose([a_draft_row(kv_len=4)])
    assert (second.token_ids, second.kv_len) == ((2, 3, 1, 2), 7)


def test_a_draft_model_reads_its_own_guesses_and_overwrites_refused_ones() -> None:
    def remembers(history: Seq[int]) -> int:
        return (sum(history) * 7 + len(history)) % 50

    drafter = a_drafter("draft_model", model=ScriptedModel(remembers))
    history = list(PROMPT)
    kv_len = 0
    for refused in (17, 3, 44):  # after each step the target says something else
        (draft,) = drafter.propose([a_draft_row(history, kv_len=kv_len)])
        expected = list(history)
        for _ in range(4):
            expected.append(remembers(expected))
        assert list(draft.token_ids) == expected[len(history) :]
        kv_len = draft.kv_len + 1  # the first guess was right
        history += [draft.token_ids[0], refused]


def test_a_fully_cached_history_is_guessed_from_too() -> None:
    drafter = a_drafter("draft_model")
    drafter.propose([a_draft_row(max_tokens=0)])
    (draft,) = drafter.propose([a_draft_row(kv_len=len(PROMPT))])
    assert (draft.token_ids, draft.kv_len) == ((2, 3, 1, 2), 7)


@pytest.mark.parametrize(
    ("max_positions", "num_guesses", "kv_len"), [(100, 4, 7), (9, 3, 7), (7, 1, 7), (6, 0, 6)]
)
def test_a_draft_model_does_not_run_past_its_own_length(
    max_positions: int, num_guesses: int, kv_len: int
) -> None:
    drafter = a_drafter("draft_model", max_positions=max_positions)
    (draft,) = drafter.propose([a_draft_row()])
    assert (len(draft.token_ids), draft.kv_len) == (num_guesses, kv_len)


def test_a_draft_model_that_breaks_down_leaves_the_guesses_it_had() -> None:
    def breaks(history: Seq[int]) -> int:
        return counts_up(history) if len(history) < 9 else 260  # the scripted model's NaN

    (draft,) = a_drafter("draft_model", model=ScriptedModel(breaks)).propose([a_draft_row()])
    assert draft.token_ids == (2, 3)


def test_a_draft_model_reports_its_probabilities_only_where_rejection_needs_them() -> None:
    requests = [
        a_sampling_request(PROMPT, verify=rule, temperature=1.0) for rule in ("replay", "rejection")
    ]
    replay, rejection = a_drafter("draft_model").propose(
        [a_draft_row(seq_id=idx, request=request) for idx, request in enumerate(requests)]
    )
    assert replay.probs is None
    assert rejection.probs is not None
    assert rejection.probs.shape == (4, VOCAB_SIZE)
    assert rejection.probs.sum(dim=1).tolist() == pytest.approx([1.0] * 4)


# --- how they are asked for ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("", []),
        ("none", [("none", None)]),
        ("ngram", [("ngram", None)]),
        ("ngram, draft_model:/models/a b:c", [("ngram", None), ("draft_model", "/models/a b:c")]),
        ("synthetic:0.8,0.6,ngram", [("synthetic", "0.8,0.6"), ("ngram", None)]),
    ],
)
def test_a_command_line_names_drafters_and_their_arguments(
    spec: str, expected: list[tuple[str, str | None]]
) -> None:
    assert parse_drafter_spec(spec) == expected


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("hydra", ["'hydra'", "ngram", "draft_model"]),
        ("ngram,0.5", ["'0.5'"]),
        ("ngram,ngram", ["twice"]),
    ],
)
def test_a_wrong_command_line_is_told_what_is_known(spec: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_drafter_spec(spec)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("none", {"argument": "x"}, ["no argument", "'x'"]),
        ("ngram", {"argument": "3"}, ["no argument", "'3'"]),
        ("draft_model", {"model": None}, ["draft_model:PATH"]),
        ("oracle", {"truth": None}, ["recorded outputs"]),
        ("scripted", {"script": None}, ["wrote down"]),
        ("synthetic", {"argument": None}, ["synthetic:0.8,0.6"]),
        ("synthetic", {"argument": "0.8,1.5"}, ["from 0 to 1", "'0.8,1.5'"]),
        ("synthetic", {"argument": "often"}, ["'often'"]),
        ("synthetic", {"argument": "nan"}, ["'nan'"]),
    ],
)
def test_a_drafter_that_cannot_be_made_says_what_it_needs(
    name: str, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        a_drafter(name, **changes)
    assert all(word in str(caught.value) for word in words)
