"""Drafts taught on a tiny target: they learn, they go on where they stopped, and they serve."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec
import pytest
import torch

from specserve.cli import main
from specserve.errors import ConfigError, ModelError
from specserve.loading import LoadedModel, load_model
from specserve.models.config import parse_model_config
from specserve.models.decoder import Decoder
from specserve.training.answers import AnswerStore
from specserve.training.build import new_student
from specserve.training.eagle3 import Eagle3Student
from specserve.training.export import export
from specserve.training.lessons import Document, make_lesson, split
from specserve.training.loop import Listener, Run, Schedule, StepReport, train
from specserve.training.settings import TrainOptions
from specserve.training.students import Deep, Student
from specserve.training.teacher import Teacher
from specserve.weights import load_weights, read_config
from specserve_drafts.head_files import read_checkpoint
from specserve_kernels import make_backend
from specserve_kernels.interface import PagedBatch
from tests.head_checkpoints import target_parts
from tests.test_eagle3 import Running, new_drafter
from tests.training_world import (
    VOCAB,
    a_lesson,
    a_shape,
    a_student,
    a_target,
    prompts_file,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# --- what is trained is what serves ----------------------------------------------------------


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("norms", [True, False], ids=["norms of 3.1", "plain"])
def test_an_exported_head_guesses_in_the_drafter_what_it_guessed_in_training(
    tmp_path: Path, form: str, norms: bool
) -> None:
    shape = a_shape(num_depths=4, fc_norm=norms, norm_output=norms)
    export(a_student(shape), tmp_path, form, None)
    _, tensors = read_checkpoint(str(tmp_path))  # as stored: rounding is not what is tested
    params = {n: t.double() for n, t in tensors.items() if n not in ("d2t", "t2d")}
    target_ids = torch.arange(shape.draft_vocab_size) + tensors["d2t"]
    student = Eagle3Student(shape, params, target_ids, target_parts().embedding)
    drafter = new_drafter("torch", str(tmp_path))
    assert drafter.hidden_layers == shape.hidden_layers
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
    for seq_id, num_known in enumerate(range(3, len(text))):
        running = Running(drafter, text[: num_known - 1], seq_id=seq_id)
        running.prefill(chunk=4, first_token=text[num_known - 1])
        draft = running.propose(max_tokens=4)
        drafter.forget(seq_id)
        # In training the same step begins at the one place of an answer that goes on like this.
        whole = [*text[:num_known], *draft.token_ids, 0]
        lesson = a_lesson([(whole, num_known - 1)], target_ids)
        assert len(draft.token_ids) == 4
        for depth, _, places, logits in student.guesses(lesson):
            own = logits[places == depth][0]  # the step that begins at place 0
            assert int(target_ids[own.argmax()]) == draft.token_ids[depth]
            assert float(torch.softmax(own, 0).max()) == pytest.approx(draft.scores[depth])


def test_texts_of_a_batch_are_judged_as_if_alone() -> None:
    shape = a_shape()
    student = a_student(shape, torch.float64)
    texts = [([3, 1, 4, 1, 5, 9, 2, 6, 5], 3), ([7, 7, 8], 1), (list(range(20, 37)), 9)]
    together = list(student.guesses(a_lesson(texts, student.target_ids)))
    for row, text in enumerate(texts):
        for alone in student.guesses(a_lesson([text], student.target_ids)):
            mine = together[alone.depth].documents == row
            assert torch.allclose(together[alone.depth].logits[mine], alone.logits)


def test_places_that_go_deep_are_taught_what_they_would_be_among_all() -> None:
    student = a_student(a_shape(), torch.float64)
    lesson = a_lesson([(list(range(20, 37)), 4), ([7, 7, 8, 9, 1], 1)], student.target_ids)
    everywhere = list(student.guesses(lesson))
    for phase in range(3):
        some = list(student.guesses(lesson, Deep(every=3, phase=phase)))
        assert torch.equal(some[0].logits, everywhere[0].logits)  # the first guess: all places
        for few, all_of_them in zip(some[1:], everywhere[1:], strict=True):
            mine = (all_of_them.places - few.depth + phase) % 3 == 0
            assert 0 < len(few.places) < len(all_of_them.places)
            assert torch.equal(few.places, all_of_them.places[mine])
            assert torch.allclose(few.logits, all_of_them.logits[mine])


def test_an_int8_matrix_without_its_scales_is_refused(tmp_path: Path) -> None:
    student = a_student(a_shape())
    export(student, tmp_path, "int8", None)
    tensors = load_weights(tmp_path)
    from safetensors.torch import save_file

    wrong = {n: t.clone() for n, t in tensors.items()}
    wrong["fc.weight_scale"] = torch.ones(1, 1)
    save_file(wrong, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"fc\.weight_scale"):
        read_checkpoint(str(tmp_path))


def test_an_exported_language_model_computes_in_the_engine_what_it_computed_in_training(
    tmp_path: Path,
) -> None:
    target = load_model(str(a_target(tmp_path / "target")), "fp64", "cpu", lambda line: None)
    options = TrainOptions(kind="lm", hidden=32, layers=2, steps=1)
    student = new_student(options, target, torch.arange(0))
    for name, own in student.params.items():  # as stored
        student.params[name] = own.bfloat16().double()
    student = type(student)(student.shape, student.params, 3)  # type: ignore[attr-defined,call-arg] # LmStudent
    export(student, tmp_path / "draft", "bf16", target.path)
    config = parse_model_config(read_config(tmp_path / "draft"))
    decoder = Decoder(
        config,
        load_weights(tmp_path / "draft"),
        dtype=torch.float64,
        backend=make_backend("cpu"),
    )
    text = [5, 9, 33, 2, 60, 17, 8, 8]
    document = Document(
        doc_id=0, prompt_idx=0, temperature=0.0, prompt_len=2, token_ids=tuple(text)
    )
    teacher = a_teacher(student, target)
    [guesses] = student.guesses(teacher.lesson([document]))
    batch = PagedBatch((0, len(text)), (0,), ((0,),), (None,), 16)
    logits = decoder.forward(
        torch.tensor(text),
        torch.arange(len(text)),
        batch,
        decoder.new_kv_cache(1, 16),
        range(2, len(text) - 1),
    )
    assert torch.allclose(guesses.logits, logits)


# --- learning --------------------------------------------------------------------------------


def a_teacher(student: Student, target: LoadedModel, cache: Path | None = None) -> Teacher:
    return Teacher(
        target.decoder,
        hidden_layers=student.hidden_layers,
        target_ids=student.target_ids,
        vocab_size=target.vocab_size,
        num_top=16,
        temperature=0.7,
        max_length=64,
        cache=cache,
        cache_bytes=10**9,
    )


def counting_texts(count: int) -> list[Document]:
    """A toy language: each token follows from the one before."""
    found = []
    for idx in range(count):
        text = [2 + idx * 5 % 60]
        while len(text) < 16 + idx % 9:
            text.append(2 + (text[-1] * 3 + 1) % 60)
        found.append(
            Document(
                doc_id=idx,
                prompt_idx=idx,
                temperature=0.0,
                prompt_len=4,
                token_ids=tuple(text),
            )
        )
    return found


SCHEDULE = Schedule(
    steps=120,
    minutes=None,
    rate=5e-3,
    warmup_steps=5,
    batch_tokens=256,
    loss="lk",
    judge_every=40,
    save_every=10,
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = a_target(tmp_path_factory.mktemp("target"))
    return load_model(str(directory), "fp32", "cpu", lambda line: None)


class SaysTheText(Teacher):
    """The target's own states, and a law that says the toy language's next token."""

    def study(self, document: Document):  # type: ignore[no-untyped-def] # as Teacher's
        studied = super().study(document)
        logits = torch.zeros(document.num_places, VOCAB)
        answers = torch.tensor(document.answer_ids[1:])
        logits[torch.arange(len(answers)), answers] = 12.0
        from specserve.training.losses import law_of

        return studied._replace(law=law_of(logits, self.target_ids, 16, 0.7))


def a_run(
    target: LoadedModel,
    directory: Path,
    kind: str,
    *,
    schedule: Schedule = SCHEDULE,
    stop_after: int | None = None,
) -> tuple[Run, Student, list[StepReport]]:
    options = TrainOptions(kind=kind, depths=3, hidden=32, layers=1, steps=1)  # type: ignore[arg-type] # Literal
    student = new_student(options, target, torch.arange(2, 62))
    teacher = SaysTheText(
        target.decoder,
        hidden_layers=student.hidden_layers,
        target_ids=student.target_ids,
        vocab_size=target.vocab_size,
        num_top=16,
        temperature=0.7,
        max_length=64,
        cache=directory / "states",
        cache_bytes=10**9,
    )
    learn_from, held_out = split(counting_texts(90), held_out=0.1, seed=0)
    reports: list[StepReport] = []
    run = train(
        student,
        teacher,
        learn_from,
        held_out,
        schedule,
        directory,
        device=CPU,
        listener=Listener(step=reports.append, stop=lambda: len(reports) == stop_after),
    )
    return run, student, reports


@pytest.mark.parametrize("kind", ["eagle3", "lm"])
def test_the_loss_falls_and_held_out_acceptance_rises_from_chance(
    target: LoadedModel, tmp_path: Path, kind: str
) -> None:
    run, _, reports = a_run(target, tmp_path, kind)
    assert reports[-1].loss < 0.3 * reports[0].loss
    (_, first), (_, last) = run.history[0], run.history[-1]
    assert first.accepted[0] < 0.3
    assert first.tokens_per_step < 1.4
    assert min(last.accepted) > 0.9
    assert min(last.overlap) > 0.8
    assert last.tokens_per_step > 3
    assert [step for step, _ in run.history] == [0, 40, 80, 120]


@pytest.mark.parametrize("kind", ["eagle3", "lm"])
def test_a_run_that_was_stopped_ends_in_the_same_bits(
    target: LoadedModel, tmp_path: Path, kind: str
) -> None:
    short = Schedule(
        steps=30, minutes=None, rate=5e-3, batch_tokens=256, judge_every=100, save_every=10
    )
    whole, expected, reports = a_run(target, tmp_path / "whole", kind, schedule=short)
    first, _, _ = a_run(target, tmp_path / "parts", kind, schedule=short, stop_after=13)
    assert first.position.step == 13
    second, found, rest = a_run(target, tmp_path / "parts", kind, schedule=short)
    assert [one.loss for one in rest] == [one.loss for one in reports[13:]]
    assert second.position.num_places == whole.position.num_places
    for name, own in expected.params.items():
        assert torch.equal(own, found.params[name]), name


def test_a_draft_learns_on_from_another_with_other_words(
    target: LoadedModel, tmp_path: Path
) -> None:
    _, learned, _ = a_run(target, tmp_path / "run", "eagle3")
    export(learned, tmp_path / "draft", "int8", None)
    options = TrainOptions(steps=1, depths=3, start_from=str(tmp_path / "draft"))
    target_ids = torch.tensor([1, *range(3, 62)])  # it knew 2 to 61
    begun = new_student(options, target, target_ids)
    fresh = new_student(TrainOptions(steps=1, depths=3), target, target_ids)
    for name, own in begun.params.items():
        was = learned.params[name].detach()
        if name == "lm_head.weight":
            assert torch.equal(own[0], fresh.params[name][0])
            own, was = own[1:], was[1:]
        assert own.dtype == torch.float32
        assert torch.allclose(own, was, atol=float(was.abs().max()) / 100), name
    options = msgspec.structs.replace(options, intermediate=16)
    with pytest.raises(ConfigError, match=r"--start-from .*mlp.*\[16, 32\].*give the flags"):
        new_student(options, target, target_ids)


def test_states_from_disk_teach_what_fresh_ones_teach(target: LoadedModel, tmp_path: Path) -> None:
    student = new_student(TrainOptions(steps=1), target, torch.arange(2, 62))
    text = counting_texts(3)
    fresh = a_teacher(student, target).lesson(text)
    cached = a_teacher(student, target, tmp_path)
    cached.lesson(text)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    again = a_teacher(student, target, tmp_path).lesson(text)
    assert fresh.states is not None
    assert again.states is not None
    assert torch.equal(fresh.states, again.states)
    for one, other in zip(fresh.laws, again.laws, strict=True):
        assert torch.equal(one, other)


def test_a_law_is_the_targets_after_the_token_before(target: LoadedModel) -> None:
    """Place 0 of an answer is what follows its first token."""
    student = new_student(TrainOptions(steps=1), target, torch.arange(VOCAB))
    teacher = a_teacher(student, target)
    [document] = counting_texts(1)
    lesson = make_lesson([teacher.study(document)])
    for length in (5, 9):
        short = Document(
            doc_id=9, prompt_idx=9, temperature=0.0, prompt_len=length - 1,
            token_ids=document.token_ids[: length + 1],
        )  # fmt: skip
        alone = teacher.study(short).law
        place = length - document.prompt_len - 1
        assert torch.equal(lesson.laws.entries[0, place], alone.entries[0])
        assert torch.allclose(lesson.laws.log_probs[0, place], alone.log_probs[0], atol=1e-5)


# --- the commands ----------------------------------------------------------------------------


def train_command(target: Path, tmp_path: Path, *more: str) -> list[str]:
    return [
        "draft", "train", "--model", str(target), "--dtype", "fp32", "--backend", "cpu",
        "--data", str(prompts_file(tmp_path / "prompts.txt", 80)), "--out", str(tmp_path / "out"),
        "--tokens", "3000", "--max-answer", "48", "--max-length", "64", "--round-size", "40",
        "--draft-vocab", "48", "--depths", "3", "--hidden", "32", "--layers", "1",
        "--batch-tokens", "512", "--held-out", "0.2", "--judge-every", "20", "--threads", "1",
        "--cache-gb", "0.1", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["eagle3", "lm"])
def test_a_draft_is_trained_resumed_and_evaluated_from_the_command_line(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = a_target(tmp_path / "target")
    command = train_command(target, tmp_path, "--kind", kind, "--rate", "0.01")
    assert main([*command, "--steps", "20"]) == 0
    out = tmp_path / "out"
    answers = AnswerStore(out / "training" / "answers").load()
    card = json.loads((out / "card.json").read_text())
    assert card["num_steps"] == 20
    assert main([*command, "--steps", "60", "--resume"]) == 0
    assert AnswerStore(out / "training" / "answers").load() == answers
    card = json.loads((out / "card.json").read_text())
    assert card["num_steps"] == 60
    assert card["num_tokens"] == sum(len(one.answer_ids) for one in answers) >= 3000
    assert [step for step, _ in card["held_out"]] == [0, 20, 40, 60]
    (_, first), (_, last) = card["held_out"][0], card["held_out"][-1]
    assert last["tokens_per_step"] > first["tokens_per_step"]
    text = (out / "CARD.md").read_text()
    assert "Held-out" in text
    assert str(tmp_path) not in text + (out / "card.json").read_text()
    capsys.readouterr()
    report = tmp_path / "eval.json"
    evaluate = [
        "draft", "eval", "--draft", str(out), "--model", str(target), "--dtype", "fp32",
        "--draft-dtype", "fp32", "--backend", "cpu", "--threads", "1", "--k", "3",
        "--max-tokens", "48", "--prompts", str(held_out_file(tmp_path, answers)),
        "--json", str(report),
    ]  # fmt: skip
    assert main(evaluate) == 0
    assert "tok/step" in capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["drafter"] == ("eagle3" if kind == "eagle3" else "draft_model")
    assert found["cost"]["relative"] > 0
    by_temperature = {one["temperature"]: one for one in found["scores"]}
    assert set(by_temperature) == {0, 0.7}
    # The engine and the judge count the same thing, up to the ends of answers.
    greedy = by_temperature[0]
    assert greedy["tokens_per_step"] == pytest.approx(last["tokens_per_step"], rel=0.15)


def held_out_file(tmp_path: Path, answers: Seq[Document]) -> Path:
    """The prompts whose greedy answers the run held out."""
    lines = (tmp_path / "prompts.txt").read_text().splitlines()
    _, held_out = split(answers, held_out=0.2, seed=0)
    path = tmp_path / "held_out.txt"
    chosen = [lines[one.prompt_idx] for one in held_out if one.temperature == 0]
    path.write_text("\n".join(chosen))
    return path


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--steps or --minutes"),
        (["--steps", "5", "--tokens", "0"], "--tokens is 0"),
        (["--steps", "5", "--rate", "0"], "--rate is 0"),
        (["--steps", "5", "--held-out", "1"], "--held-out is 1"),
        (["--steps", "5", "--temperatures", "hot"], "--temperatures is 'hot'"),
        (["--steps", "5", "--batch-tokens", "63"], "--batch-tokens is 63"),
        (["--steps", "5", "--kind", "lm", "--export", "int8"], "--export int8"),
        (["--steps", "5", "--device", "tpu"], "--device is 'tpu'"),
        (["--steps", "5", "--resume"], "--resume"),
        (["--steps", "5", "--max-length", "10"], "--max-length is 10"),
        (["--steps", "5", "--data", "generated:x"], "--data is 'generated:x'"),
        (["--steps", "5", "--data", "/nowhere.jsonl"], "--data /nowhere.jsonl"),
        (["--steps", "5", "--kind", "lm", "--hidden", "40"], "--hidden is 40"),
    ],
)
def test_what_cannot_be_trained_is_said_by_its_flag(
    tmp_path: Path, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = train_command(a_target(tmp_path / "target"), tmp_path)
    command[command.index("--tokens") + 1] = "100"
    assert main([*command, *flags]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # so that the right command can follow


def test_a_run_is_never_overwritten_nor_resumed_with_other_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = train_command(a_target(tmp_path / "target"), tmp_path, "--steps", "1")
    command[command.index("--tokens") + 1] = "100"
    assert main(command) == 0
    assert main(command) == 2
    assert "--resume" in capsys.readouterr().err
    assert main([*command, "--resume", "--depths", "4"]) == 2
    assert "--depths is 4 now and was 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--draft", "/nowhere"], "/nowhere"),
        (["--draft", "x", "--k", "0"], "--k is 0"),
        (["--draft", "x", "--temperature", "hot"], "--temperature is 'hot'"),
        (["--draft", "x", "--prompts", "/nowhere.txt"], "--prompts /nowhere.txt"),
    ],
)
def test_what_cannot_be_evaluated_is_said_by_its_flag(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["draft", "eval", *flags]) == 2
    assert said in capsys.readouterr().err


def test_prompts_are_written_as_loadgen_reads_them(tmp_path: Path) -> None:
    from specserve_loadgen.prompts import load_prompts

    path = tmp_path / "prompts.jsonl"
    assert main(["draft", "prompts", "--count", "50", "--out", str(path)]) == 0
    assert len(load_prompts(str(path))) == 50
