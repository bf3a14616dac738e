"""What is believed of a guess is what happens: calibration, on simulated outcomes."""

from __future__ import annotations

import random

import pytest

from specserve.drafting import Draft, chain
from specserve.speculation.beliefs import Beliefs
from specserve.speculation.costs import UNMEASURED
from specserve.speculation.hindsight import calibration_error

LENGTH = 6


def outcomes(
    *, scores: bool, distort: float = 1.0, change_at: int | None = None, seed: int = 0
) -> list[tuple[float, bool]]:
    """(believed survival, survived) after warm-up. Requests differ, and so do their guesses."""
    rng = random.Random(seed)
    beliefs, pairs = Beliefs(["d"], UNMEASURED), []
    for step in range(6000):
        seq_id = step % 12
        base = 0.15 + 0.07 * seq_id
        if change_at is not None and step >= change_at:
            base = 1.0 - base
        rates = [min(0.98, max(0.02, base + rng.gauss(0, 0.12))) for _ in range(LENGTH)]
        text = list(range(100, 100 + LENGTH + 1))
        right = [rng.random() < rate for rate in rates]
        guesses = [token if ok else 0 for token, ok in zip(text, right, strict=False)]
        said = [rate**distort for rate in rates] if scores else ()
        judged = beliefs.judge("d", seq_id, chain(guesses, scores=said))
        for depth, chance in enumerate(judged.chances):
            if step > 1500:
                pairs.append((chance, all(right[: depth + 1])))
        emitted = text[: next((at for at, ok in enumerate(right) if not ok), LENGTH) + 1]
        beliefs.settle("d", seq_id, judged, 1, emitted)
    return pairs


@pytest.mark.parametrize(
    "world",
    [
        {"scores": True},
        {"scores": True, "distort": 3.0},
        {"scores": True, "distort": 0.3},
        {"scores": False},
        {"scores": False, "change_at": 3500},
        {"scores": True, "distort": 2.0, "change_at": 3500},
    ],
    ids=str,
)
def test_the_calibration_error_is_at_most_two_percent_after_warm_up(
    world: dict[str, float],
) -> None:
    errors = [calibration_error(outcomes(seed=seed, **world)) for seed in range(3)]
    assert sum(errors) / len(errors) <= 0.02


def test_the_error_measure_sees_a_liar() -> None:
    pairs = [(0.9, at % 2 == 0) for at in range(1000)]
    assert calibration_error(pairs) == pytest.approx(0.4)


def test_requests_that_fare_differently_are_told_apart_without_any_score() -> None:
    rng, beliefs = random.Random(0), Beliefs(["d"], UNMEASURED)
    for step in range(2000):
        seq_id = step % 2
        right = rng.random() < (0.1, 0.9)[seq_id]
        judged = beliefs.judge("d", seq_id, chain([5]))
        beliefs.settle("d", seq_id, judged, 1, [5 if right else 6])
    poor, good = (beliefs.judge("d", seq_id, chain([5])).chances[0] for seq_id in (0, 1))
    assert poor < 0.2 < 0.8 < good


def test_a_child_never_survives_more_often_than_its_parent() -> None:
    tree = Draft(
        token_ids=(1, 2, 3, 4, 5),
        parents=(-1, -1, 0, 0, 2),
        scores=(0.3, 0.2, 1.0, 0.5, 0.9),
    )
    judged = Beliefs(["d"], UNMEASURED).judge("d", 0, tree)
    assert list(judged.depths) == [1, 1, 2, 2, 3]
    for node, parent in enumerate(tree.parents):
        assert judged.chances[node] <= (1.0 if parent < 0 else judged.chances[parent])


def test_a_tree_teaches_by_the_path_the_text_took() -> None:
    beliefs = Beliefs(["d"], UNMEASURED)
    tree = Draft(token_ids=(1, 2, 3, 4), parents=(-1, -1, 1, 1))
    for _ in range(300):
        beliefs.settle("d", 0, beliefs.judge("d", 0, tree), 2, [2, 4, 9])
    first, second, third, fourth = beliefs.judge("d", 0, tree).chances
    assert first < 0.1 < 0.85 < second
    assert third < 0.1 < 0.8 < fourth


def test_what_a_drafter_never_gets_right_is_still_looked_at() -> None:
    beliefs = Beliefs(["d"], UNMEASURED)
    for _ in range(500):
        beliefs.settle("d", 0, beliefs.judge("d", 0, chain([1, 2])), 1, [7])
    judged = beliefs.judge("d", 0, chain([1, 2]))
    assert len(judged.chances) == 1
    assert judged.chances[0] < 0.02
    for _ in range(100):
        beliefs.settle("d", 0, beliefs.judge("d", 0, chain([1, 2])), 1, [1, 2, 3])
    assert beliefs.judge("d", 0, chain([1, 2])).chances[0] > 0.5
