"""What another K would have given: exact where a guess does not depend on when it is made."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import openai
import pytest

from specserve.cli import main
from specserve.errors import ConfigError
from specserve.speculation.hindsight import RecordedRow, RecordedStep
from specserve.speculation.recording import read_steps
from specserve.whatif import analytic_length, predict, texts_of, with_live
from specserve_loadgen.intervals import Interval
from specserve_loadgen.studies.acceptance import Plan, run_acceptance
from specserve_loadgen.studies.arms import OFF, Arm
from specserve_loadgen.studies.cells import Target
from tests.loadgen_server import serving
from tests.study_server import StudyServer
from tests.test_demo_server import start
from tests.training_world import a_target

LENGTH, MOST = 4000, 8


def some_texts(num_texts: int = 5, *, bursty: bool) -> list[list[bool]]:
    """Which tokens of each text the drafter knows. Bursty: they come in long runs, as copies do."""
    rng = random.Random(2)
    texts = []
    for _ in range(num_texts):
        known: list[bool] = []
        while len(known) < LENGTH:
            run = rng.choice([1, 12]) if bursty else 1
            known += [rng.random() < 0.6] * run
        texts.append(known[:LENGTH])
    return texts


def walked(known: list[bool], k: int) -> list[tuple[int, list[bool]]]:
    """(place, right) of each proposal of K guesses when a text is decoded with them."""
    place, found = 0, []
    while place + k < len(known):
        right = [all(known[place : place + at + 1]) for at in range(k)]
        found.append((place, right))
        place += sum(right) + 1
    return found


def recorded(texts: list[list[bool]], k: int) -> list[RecordedStep]:
    return [
        RecordedStep(1, (a_row(seq, place, right),), (0.01,) * (k + 1), 0.0, 0.0, named=True)
        for seq, known in enumerate(texts)
        for place, right in walked(known, k)
    ]


def a_row(seq: int, place: int, right: list[bool]) -> RecordedRow:
    count = len(right)
    chances, parents = (0.5,) * count, tuple(range(-1, count - 1))
    return RecordedRow(chances, parents, tuple(right), (True,) * count, "suffix", seq, place)


def length_of(texts: list[list[bool]], k: int) -> float:
    steps = [right for known in texts for _, right in walked(known, k)]
    return 1 + sum(map(sum, steps)) / len(steps)


@pytest.mark.parametrize("bursty", [False, True])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_a_smaller_k_is_predicted_from_a_larger_one(k: int, *, bursty: bool) -> None:
    texts = some_texts(bursty=bursty)
    one = predict(recorded(texts, MOST), "suffix", k)
    assert one.predicted == pytest.approx(length_of(texts, k), rel=0.03)
    if not bursty:  # each guess as hard as the next: the formula holds
        assert one.analytic == pytest.approx(length_of(texts, k), rel=0.03)


def test_the_formula_is_wrong_where_right_guesses_come_in_runs_and_the_walk_is_not() -> None:
    texts = some_texts(bursty=True)
    one = predict(recorded(texts, MOST), "suffix", 4)
    truth = length_of(texts, 4)
    assert abs(one.analytic / truth - 1) > 0.05 > abs(one.predicted / truth - 1)


def test_the_formula_is_the_sum_of_the_chances_to_get_so_far() -> None:
    assert analytic_length(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert analytic_length(1.0, 3) == 4.0
    assert analytic_length(0.0, 3) == 1.0


def test_trees_and_files_without_places_are_not_walked() -> None:
    tree = RecordedRow((0.5,) * 2, (-1, -1), (True, False), (True, False), "suffix", 0, 5)
    old = RecordedRow((0.5,), (-1,), (True,), (True,), "suffix")
    steps = [RecordedStep(1, (row,), (0.1, 0.1, 0.1), 0.0, 0.0) for row in (tree, old)]
    assert texts_of(steps, "suffix") == {}
    with pytest.raises(ConfigError, match="no chain of guesses by suffix"):
        predict(steps, "suffix", 3)


async def test_a_prediction_stands_beside_the_live_run_of_the_same_drafter_and_k() -> None:
    server = StudyServer(lambda one, at: 0.6)
    async with serving(server.app()) as url:
        arms = (OFF, Arm("suffix:2", "suffix", 2))
        plan = Plan(target=Target(url=url), arms=arms, per_category=2)
        study = await run_acceptance(plan, lambda line: None)
    live = study.cells[1].summary.mean_acceptance_length
    assert isinstance(live, Interval)
    texts = recorded(some_texts(bursty=False), MOST)
    two, three = with_live([predict(texts, "suffix", 2), predict(texts, "suffix", 3)], study)
    assert (two.live, two.live_low, two.live_high) == (live.estimate, live.low, live.high)
    assert two.error == pytest.approx(two.predicted / live.estimate - 1)
    assert (three.live, three.error) == (None, None)


@pytest.mark.timeout(180)
def test_a_server_records_what_named_drafters_proposed_and_whatif_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = tmp_path / "steps.jsonl", tmp_path / "target"
    target.mkdir()
    model = str(a_target(target))
    server = start(tmp_path, "--model", model, "--record-steps", str(file))
    drafted = accepted = emitted = steps = 0
    try:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        for seed in range(6):
            reply = client.completions.create(
                model=model,
                prompt="w5 w6 w7 w8 " * 4 + "w9",
                temperature=0.05,
                seed=seed,
                max_tokens=60,
                extra_body={
                    "ignore_eos": True,
                    "speculation": {"drafter": "suffix", "max_draft_tokens": 5},
                },
            )
            assert reply.model_extra is not None
            spec = reply.model_extra["metrics"]["speculative_decoding"]
            drafted += spec["num_draft_tokens"]
            accepted += spec["num_accepted_draft_tokens"]
            steps += spec["num_spec_steps"]
            emitted += round(spec["mean_acceptance_length"] * spec["num_spec_steps"])
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    finally:
        server.kill()
    kept = read_steps(file)
    rows = [row for step in kept for row in step.rows]
    assert all(step.named for step in kept)
    assert {row.seq for row in rows if row.right}  # texts are told apart
    assert sum(sum(row.kept) for row in rows) == drafted > 0
    assert sum(sum(row.right) for row in rows) == accepted
    assert main(["study", "whatif", str(file), "--k", "1,5", "--json", str(tmp_path / "x")]) == 0
    one, five = json.loads((tmp_path / "x").read_text())["predictions"]
    assert 1.0 <= one["predicted"] <= 2.0
    # The K that was recorded: its walk is the one that was taken.
    assert five["predicted"] == pytest.approx(emitted / steps, rel=0.05)
    assert "suffix" in capsys.readouterr().out
    # Of what a request named nothing was chosen: there is no choice to regret.
    assert main(["study", "regret", str(file), "--warm-up", "0"]) == 2
