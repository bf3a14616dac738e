"""`specserve draft train`: answers, vocabulary, training, export, card, in that order."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import signal
import sys
import threading
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec
import torch
from tqdm import tqdm

from specserve.chat_template import render_chat
from specserve.errors import ConfigError
from specserve.llm import LLM
from specserve.loading import LoadedModel, check_backend, choose_dtype, load_model, use_threads
from specserve.tokenizer import Tokenizer
from specserve.training.answers import AnswerStore, Plan, generate
from specserve.training.build import new_student
from specserve.training.card import Card, write_card
from specserve.training.export import chosen_form, export
from specserve.training.heldout import HeldOut
from specserve.training.lessons import Document, split
from specserve.training.loop import Listener, Run, Schedule, StepReport, train
from specserve.training.prompts import read_prompts
from specserve.training.settings import (
    TrainOptions,
    begin,
    check,
    command_of,
    parse_temperatures,
    without_folders,
)
from specserve.training.students import Student
from specserve.training.teacher import Teacher
from specserve.training.vocabulary import coverage, most_frequent
from specserve.types import SamplingParams
from specserve.version import __version__
from specserve.weights import resolve_model


def run_training(options: TrainOptions) -> Path:
    """The directory of the draft. ConfigError and ModelError say what to change."""
    check(options)
    check_backend(options.backend)
    device = _device(options.device)
    plan = _plan(options)
    directory = begin(options)
    use_threads(options.threads)
    dtype = choose_dtype(options.dtype, options.backend)
    documents = _answers(options, plan, dtype, directory)
    target = load_model(options.model, dtype, options.backend, _say)
    learn_from, held_out = split(documents, held_out=options.held_out, seed=options.seed)
    if not learn_from or not held_out:
        raise ConfigError(
            f"--tokens {options.tokens} gave {len(documents)} answers, too few to learn from some "
            "and hold out others: raise it, or give more prompts"
        )
    target_ids = most_frequent(
        (one.answer_ids for one in learn_from),
        min(options.draft_vocab, target.vocab_size) if options.kind == "eagle3" else 0,
        target.vocab_size,
        always=target.tokenizer.eos_ids,
    )
    student = new_student(options, target, target_ids)
    known = coverage((one.answer_ids for one in held_out), student.target_ids)
    _say(
        f"{len(learn_from):,} answers to learn from, {len(held_out):,} held out, whose tokens the "
        f"draft's {len(student.target_ids):,} cover to {known:.2%}"
    )
    _move(student, device)
    teacher = _teacher(options, target, student, directory)
    run, history = _train(options, student, teacher, learn_from, held_out, directory, device)
    form = chosen_form(student, options.export)
    num_bytes = export(student, directory, form, target.path if options.kind == "lm" else None)
    card = _card(options, documents, plan.num_prompts, held_out, run, history)
    card = msgspec.structs.replace(
        card,
        target_dtype=dtype,
        num_params=sum(own.numel() for own in student.params.values()),
        draft_vocab_size=len(student.target_ids),
        coverage=known,
        form=form,
        num_bytes=num_bytes,
    )
    write_card(card, directory)
    _say(f"wrote {directory} ({num_bytes / 1e6:.1f} MB as {form}) and its CARD.md")
    return directory


# ---- answers -----------------------------------------------------------------------------


def _plan(options: TrainOptions) -> Plan:
    tokenizer = Tokenizer.load(resolve_model(options.model, _say))
    prompts = [_prompt_ids(tokenizer, one) for one in read_prompts(options.data, options.seed)]
    return Plan(
        prompts,
        temperatures=parse_temperatures(options.temperatures),
        max_answer=options.max_answer,
        max_length=options.max_length,
        seed=options.seed,
    )


def _answers(options: TrainOptions, plan: Plan, dtype: str, directory: Path) -> list[Document]:
    store = AnswerStore(directory / "training" / "answers")
    have = sum(len(one.answer_ids) for one in store.load())
    if have >= options.tokens:
        return store.load()
    with (
        LLM(
            options.model,
            dtype=dtype,
            backend=options.backend,
            threads=options.threads,
            drafters="none",
            speculation="off",
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=max(512, options.max_num_seqs),
        ) as llm,
        tqdm(total=options.tokens, unit="tok", desc="answers", smoothing=0.1) as bar,
    ):

        def ask(prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[tuple[int, ...]]:
            results = llm.generate(list(prompts), list(params))
            return [tuple(result.outputs[0].token_ids) for result in results]

        return generate(
            plan,
            store,
            ask,
            num_tokens=options.tokens,
            round_size=options.round_size,
            progress=bar.update,
        )


def _prompt_ids(tokenizer: Tokenizer, messages: Seq[tuple[str, str]]) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n".join(text for _, text in messages))
    return render_chat(tokenizer, [{"role": role, "content": text} for role, text in messages])


# ---- training ----------------------------------------------------------------------------


def _teacher(
    options: TrainOptions, target: LoadedModel, student: Student, directory: Path
) -> Teacher:
    about = (student.target_ids.tolist(), student.hidden_layers, options.teacher_top)
    digest = hashlib.sha256(repr((*about, options.loss_temperature)).encode()).hexdigest()
    states = directory / "training" / f"states-{digest[:8]}"
    return Teacher(
        target.decoder,
        hidden_layers=student.hidden_layers,
        target_ids=student.target_ids,
        vocab_size=target.vocab_size,
        num_top=options.teacher_top,
        temperature=options.loss_temperature,
        max_length=options.max_length,
        cache=states if options.cache_gb else None,
        cache_bytes=int(options.cache_gb * 1e9),
    )


def _move(student: Student, device: torch.device) -> None:
    for name, own in student.params.items():
        student.params[name] = own.detach().to(device)


def _train(
    options: TrainOptions,
    student: Student,
    teacher: Teacher,
    learn_from: Seq[Document],
    held_out: Seq[Document],
    directory: Path,
    device: torch.device,
) -> tuple[Run, list[tuple[int, HeldOut]]]:
    """What it ended with, and all that was measured on the way, earlier sessions included."""
    log = directory / "training" / "held_out.jsonl"
    history = _read_log(log)
    with (
        tqdm(total=100, unit="%", desc="training", bar_format=_BAR) as bar,
        _until_ctrl_c() as stop,
    ):

        def step(report: StepReport) -> None:
            bar.n = round(100 * report.share_done, 2)
            overlap = " ".join(f"{value:.2f}" for value in report.overlap)
            bar.set_postfix_str(
                f"step {report.position.step}, {report.position.num_places:,} places, "
                f"loss {report.loss:.3f}, overlap {overlap}"
            )

        def judged(at: int, found: HeldOut) -> None:
            if history and history[-1][0] >= at:
                return
            history.append((at, found))
            with log.open("ab") as file:
                file.write(msgspec.json.encode(history[-1]) + b"\n")
            accepted = " ".join(f"{value:.3f}" for value in found.accepted)
            bar.write(
                f"step {at}: held out {found.tokens_per_step:.3f} tokens per step, accepted "
                f"{accepted}",
                file=sys.stderr,
            )

        run = train(
            student,
            teacher,
            learn_from,
            held_out,
            _schedule(options, device),
            directory / "training",
            device=device,
            listener=Listener(step=step, judged=judged, stop=stop.is_set),
        )
    return run, history


def _schedule(options: TrainOptions, device: torch.device) -> Schedule:
    return Schedule(
        steps=options.steps or None,
        minutes=options.minutes or None,
        rate=options.rate,
        warmup_steps=options.warmup_steps,
        batch_tokens=options.batch_tokens,
        loss=options.loss,
        depth_decay=options.depth_decay,
        deep_every=options.deep_every,
        temperature=options.loss_temperature,
        seed=options.seed,
        judge_every=options.judge_every,
        save_every=options.save_every,
        autocast=_multiplies_bf16(device),
    )


_BAR = "{desc}: {percentage:5.1f}% {bar:20} {elapsed} {postfix}"


def _read_log(path: Path) -> list[tuple[int, HeldOut]]:
    if not path.is_file():
        return []
    lines = path.read_bytes().splitlines()
    return [msgspec.json.decode(line, type=tuple[int, HeldOut]) for line in lines]


@contextlib.contextmanager
def _until_ctrl_c() -> Iterator[threading.Event]:
    """The first Ctrl-C lets the step end and be saved; the second is Python's own."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # only the main thread may handle signals
        return
    before = signal.getsignal(signal.SIGINT)

    def handle(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, handle)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _device(asked: str) -> torch.device:
    if asked == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no such device here: use cpu")
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(asked)


def _multiplies_bf16(device: torch.device) -> bool:
    """AVX-512's bf16 products without tiles lose to fp32: 70 against 110 GFLOP/s, one core."""
    return device.type == "cuda" or torch.cpu._is_amx_tile_supported()


# ---- card --------------------------------------------------------------------------------


def _card(
    options: TrainOptions,
    documents: Seq[Document],
    num_prompts: int,
    held_out: Seq[Document],
    run: Run,
    history: Seq[tuple[int, HeldOut]],
) -> Card:
    """With what only the caller knows left at nothing."""
    return Card(
        kind=options.kind,
        model=without_folders(options.model),
        data=without_folders(options.data),
        num_prompts=num_prompts,
        num_answers=len(documents),
        num_tokens=sum(len(one.answer_ids) for one in documents),
        num_held_out=len(held_out),
        num_places=run.position.num_places,
        num_steps=run.position.step,
        num_epochs=run.position.epoch + 1,
        training_seconds=run.position.seconds,
        loss_kind=options.loss,
        last_loss=run.last_loss,
        temperatures=parse_temperatures(options.temperatures),
        loss_temperature=options.loss_temperature,
        target_dtype="",
        num_params=0,
        draft_vocab_size=0,
        coverage=0.0,
        form="",
        num_bytes=0,
        held_out=tuple(history),
        command=command_of(options),
        versions={
            "specserve": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
        },
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
