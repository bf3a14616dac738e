"""Looking back upon recorded steps: the arithmetic, the file, and a real server that recorded."""

from __future__ import annotations

import json
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import openai
import pytest

from specserve.cli import main
from specserve.errors import ConfigError
from specserve.speculation.hindsight import (
    FIRST,
    KEEP,
    RecordedRow,
    RecordedStep,
    as_chosen,
    calibration_error,
    calibration_pairs,
    first,
    goodput,
    keep,
    look_back,
)
from specserve.speculation.recording import Recording, read_steps
from tests.serve_command import start
from tests.speculation_world import Kind, a_world
from tests.training_world import a_target


def some_steps(num_steps: int = 60) -> list[RecordedStep]:
    rng = random.Random(3)

    def row() -> RecordedRow:
        count = rng.randrange(5)
        chances = sorted(rng.choice([0.0, 0.025, 0.5, rng.random(), 1.0]) for _ in range(count))
        right = [rng.random() < 0.6 for _ in range(count)]
        return RecordedRow(
            tuple(reversed(chances)),
            tuple(range(-1, count - 1)),
            tuple(all(right[: idx + 1]) for idx in range(count)),
            tuple(idx < 2 for idx in range(count)),
            "ngram",
        )

    steps = []
    for idx in range(num_steps):
        rows = tuple(row() for _ in range(1 + idx % 5))
        ladder = tuple(0.01 + 0.001 * at for at in range(30))
        steps.append(RecordedStep(len(rows), rows, ladder, 0.001, 0.0001))
    return steps


def test_the_best_in_hindsight_is_the_best_of_every_policy_tried_one_by_one() -> None:
    steps = some_steps()
    look = look_back(steps)
    assert [(one.least_rows, one.most_rows) for one in look.classes] == [(1, 1), (2, 3), (4, 7)]
    for one in look.classes:
        members = [step for step in steps if one.least_rows <= step.num_rows <= one.most_rows]
        rates = {f"survival >= {at:.3f}": goodput(members, keep(at)) for at in KEEP}
        rates |= {f"first {count}": goodput(members, first(count)) for count in FIRST}
        assert one.best == pytest.approx(max(rates.values()))
        assert rates[one.best_policy] == pytest.approx(one.best)
        assert one.chosen == pytest.approx(goodput(members, as_chosen))
        assert one.num_steps == len(members)
        assert one.without == pytest.approx(goodput(members, first(0)))


def test_regret_is_the_share_of_time_that_each_class_could_have_saved_on_its_own() -> None:
    """Two classes, each with its best choice: nothing to regret, whatever one rate would say."""
    dear = tuple(0.01 * (1 + at) for at in range(9))
    wrong = RecordedRow((0.1,), (-1,), (False,), (False,), "ngram")
    right = RecordedRow((0.9,), (-1,), (True,), (True,), "ngram")
    few = RecordedStep(1, (wrong,), dear, 0.0, 0.0)
    many = RecordedStep(4, (right,) * 4, (0.01,) * 9, 0.0, 0.0)
    assert look_back([few, many]).regret == pytest.approx(0)
    idle = RecordedStep(4, (msgspec.structs.replace(right, kept=(False,)),) * 4, (0.01,) * 9, 0, 0)
    assert look_back([few, idle]).regret == pytest.approx(0.25)  # half of one step in two


def a_recording(most_steps: int = 1000, num_steps: int = 40) -> Recording:
    recording = Recording(most_steps)
    a_world({"ngram": Kind(0.7)}, num_seqs=3, recording=recording).run(num_steps)
    return recording


def test_what_is_written_is_what_was_recorded(tmp_path: Path) -> None:
    recording = a_recording()
    assert recording.write(tmp_path / "steps.jsonl") == 40
    read = read_steps(tmp_path / "steps.jsonl")
    assert read == recording.steps()
    assert any(any(row.right) and not all(row.right) for step in read for row in step.rows)


def test_a_recording_is_bounded_and_its_file_says_what_was_left_out(tmp_path: Path) -> None:
    assert a_recording(most_steps=30).write(tmp_path / "steps.jsonl") == 30
    header = json.loads((tmp_path / "steps.jsonl").read_text().splitlines()[0])
    assert (header["num_steps"], header["num_left_out"]) == (30, 10)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not what serve --record-steps writes"),
        ("{}", "is not what serve --record-steps writes"),
        ('{"schema":"other/1","num_steps":0,"num_left_out":0}', "holds other/1"),
        ('{"schema":"specserve.recorded-steps/1","num_steps":2,"num_left_out":0}', "was cut"),
    ],
)
def test_a_file_of_another_kind_is_refused_by_what_it_lacks(
    content: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "steps.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_steps(tmp_path / "steps.jsonl")


def test_nothing_to_look_back_upon_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["study", "regret", str(tmp_path / "missing")]) == 2
    a_recording().write(tmp_path / "steps.jsonl")
    assert main(["study", "regret", str(tmp_path / "steps.jsonl")]) == 2
    assert "--warm-up" in capsys.readouterr().err


def test_the_folder_of_the_recording_must_exist(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "missing" / "steps.jsonl"
    assert main(["serve", "--port", "0", "--record-steps", str(file)]) == 2
    assert "--record-steps" in capsys.readouterr().err


@pytest.mark.timeout(180)
def test_a_served_text_tells_which_of_all_proposed_guesses_were_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guesses that were verified are counted by the server, too: both must tell the same."""
    file, target = tmp_path / "steps.jsonl", tmp_path / "target"
    target.mkdir()
    server = start(
        tmp_path,
        "--model",
        str(a_target(target, layers=8)),
        "--record-steps",
        str(file),
        "--backend",
        "reference",
    )  # slow, and asked the same again and again: guesses are worth it on any machine
    drafted = accepted = 0

    def ask(idx: int) -> tuple[int, int]:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        reply = client.completions.create(
            model=str(target),
            prompt="w5 w6 w7 w8 " * 4 + f"w{9 + idx % 4}",
            temperature=(idx % 2) * 0.05,  # nearly the same texts: some guesses are wrong
            seed=idx,
            max_tokens=60,
            extra_body={"ignore_eos": True},
        )
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 60
        assert reply.model_extra is not None
        spec = reply.model_extra["metrics"]["speculative_decoding"]
        return spec["num_draft_tokens"], spec["num_accepted_draft_tokens"]

    try:
        with ThreadPoolExecutor(4) as pool:
            for one in pool.map(ask, range(24)):
                drafted, accepted = drafted + one[0], accepted + one[1]
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    finally:
        server.kill()
    steps = read_steps(file)
    assert f"{len(steps)} recorded steps are in {file}" in server.said
    rows = [row for step in steps for row in step.rows]
    assert sum(sum(row.kept) for row in rows) == drafted > accepted > 0
    num_right = sum(
        kept and right for row in rows for kept, right in zip(row.kept, row.right, strict=True)
    )
    assert num_right == accepted
    assert {row.drafter for row in rows} <= {"suffix", "ngram"}

    report = tmp_path / "report.json"
    code = main(["study", "regret", str(file), "--warm-up", "5", "--json", str(report)])
    numbers = json.loads(report.read_text())
    assert numbers["hindsight"]["regret"] == pytest.approx(look_back(steps[5:]).regret)
    assert numbers["calibration_error"] == pytest.approx(
        calibration_error(calibration_pairs(steps[5:]))
    )
    shown = capsys.readouterr().out
    assert f"regret {numbers['hindsight']['regret']:.2%}" in shown
    holds = numbers["hindsight"]["regret"] <= 0.03 and numbers["calibration_error"] <= 0.02
    assert code == (0 if holds else 1)
