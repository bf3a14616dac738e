"""The training loop: batches in a fixed order, AdamW with warm-up and a cosine, checkpoints.

A step is a function of the step before, the settings and the data alone, wall clock left out as
long as the length of the run is given in steps. Given in minutes, the learning rate follows the
clock (that of the run, pauses left out), for nobody knows how many steps will fit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec
import torch

from specserve.training.heldout import HeldOut, judge
from specserve.training.lessons import Document, Lesson, batches
from specserve.training.losses import decayed, loss_of, parts
from specserve.training.state import Position, has_state, load_state, save_state
from specserve.training.students import Deep, Student
from specserve.training.teacher import Teacher

BETAS, CLIP = (0.9, 0.95), 0.5
LEAST_RATE = 0.05  # of the peak, at the end


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Until steps or minutes, whichever comes first; None: the other decides."""

    steps: int | None
    minutes: float | None
    rate: float
    warmup_steps: int = 50
    batch_tokens: int = 2048
    loss: str = "lk"
    depth_decay: float = 0.8
    deep_every: int = 1
    temperature: float = 0.7
    seed: int = 0
    judge_every: int = 100
    save_every: int = 100
    autocast: bool = False

    def share_done(self, position: Position) -> float:
        """0..1"""
        shares = [0.0]
        if self.steps is not None:
            shares.append(position.step / max(1, self.steps))
        if self.minutes is not None:
            shares.append(position.seconds / (60 * self.minutes))
        return min(1.0, max(shares))

    def rate_at(self, position: Position) -> float:
        warm = min(1.0, (position.step + 1) / max(1, self.warmup_steps))
        cosine = (1 + math.cos(math.pi * self.share_done(position))) / 2
        return self.rate * warm * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """overlap: of the batch, by depth"""

    position: Position
    share_done: float
    loss: float
    overlap: tuple[float, ...]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What a run ended with."""

    position: Position
    history: tuple[tuple[int, HeldOut], ...]  # (steps done, what was measured)
    last_loss: float


class Listener(msgspec.Struct, frozen=True, kw_only=True):
    """Who watches. stop: asked after each step."""

    step: Callable[[StepReport], None] = lambda report: None
    judged: Callable[[int, HeldOut], None] = lambda step, found: None
    stop: Callable[[], bool] = lambda: False


def train(
    student: Student,
    teacher: Teacher,
    learn_from: Seq[Document],
    held_out: Seq[Document],
    schedule: Schedule,
    directory: Path,
    *,
    device: torch.device,
    listener: Listener,
) -> Run:
    """Goes on where directory's state stands, if there is one. Leaves a state when it ends."""
    params = list(student.params.values())
    for own in params:
        own.requires_grad_(True)
    optimiser = torch.optim.AdamW(params, lr=schedule.rate, betas=BETAS, weight_decay=0.0)
    position = Position()
    if has_state(directory):
        position = load_state(directory, student.params, optimiser)
    trainer = _Trainer(student, teacher, schedule, optimiser, device)
    history: list[tuple[int, HeldOut]] = []
    loss = math.nan

    def look() -> None:
        if history and history[-1][0] == position.step:
            return
        lessons = (
            teacher.lesson(group).to(device)
            for group in batches(held_out, batch_tokens=schedule.batch_tokens, seed=0, epoch=0)
        )
        history.append((position.step, trainer.judged(lessons)))
        listener.judged(*history[-1])

    look()
    while schedule.share_done(position) < 1 and not listener.stop():
        report = trainer.step(learn_from, position)
        position, loss = report.position, report.loss
        listener.step(report)
        if position.step % schedule.judge_every == 0:
            look()
        if position.step % schedule.save_every == 0:
            save_state(directory, student.params, optimiser, position)
    save_state(directory, student.params, optimiser, position)
    look()
    return Run(position=position, history=tuple(history), last_loss=loss)


class _Trainer:
    def __init__(
        self,
        student: Student,
        teacher: Teacher,
        schedule: Schedule,
        optimiser: torch.optim.AdamW,
        device: torch.device,
    ) -> None:
        self._student = student
        self._teacher = teacher
        self._schedule = schedule
        self._optimiser = optimiser
        self._device = device
        self._epoch = -1
        self._order: list[list[Document]] = []

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self._device.type, dtype=torch.bfloat16, enabled=self._schedule.autocast
        )

    def step(self, documents: Seq[Document], position: Position) -> StepReport:
        started = time.perf_counter()
        group = self._group(documents, position)
        lesson = self._teacher.lesson(group).to(self._device)
        for own in self._optimiser.param_groups:
            own["lr"] = self._schedule.rate_at(position)
        self._optimiser.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._device)
        overlaps = []
        deep = Deep(self._schedule.deep_every, position.step)
        with self._autocast():
            for guesses in self._student.guesses(lesson, deep):
                law = lesson.law_at(guesses.documents, guesses.places)
                found = parts(guesses.logits, law, self._schedule.temperature)
                each = loss_of(self._schedule.loss, found)
                mean = (each * law.is_known).sum() / law.is_known.sum().clamp(min=1)
                total = total + decayed(guesses.depth, self._schedule.depth_decay) * mean
                overlaps.append(float(found.overlap.detach().mean()))
        total.backward()  # type: ignore[no-untyped-call] # torch's own
        torch.nn.utils.clip_grad_norm_(list(self._student.params.values()), CLIP)
        self._optimiser.step()
        is_last = position.batch_idx + 1 == len(self._order)
        after = Position(
            step=position.step + 1,
            epoch=position.epoch + is_last,
            batch_idx=0 if is_last else position.batch_idx + 1,
            seconds=position.seconds + time.perf_counter() - started,
            num_places=position.num_places + int(lesson.num_places.sum()),
        )
        return StepReport(
            position=after,
            share_done=self._schedule.share_done(after),
            loss=float(total.detach()),
            overlap=tuple(overlaps),
        )

    def _group(self, documents: Seq[Document], position: Position) -> list[Document]:
        if self._epoch != position.epoch:
            self._epoch = position.epoch
            self._order = batches(
                documents,
                batch_tokens=self._schedule.batch_tokens,
                seed=self._schedule.seed,
                epoch=position.epoch,
            )
        return self._order[position.batch_idx]

    def judged(self, lessons: Iterable[Lesson]) -> HeldOut:
        with self._autocast():
            return judge(self._student, lessons, self._schedule.temperature)
