"""How good a draft is, from texts it never learned from, without an engine.

On a greedy text the draft's first choices say exactly what serving would accept: guesses are right
as long as they equal the text, and the text's own tokens are what deeper guesses were fed. On
sampled texts the overlap of the two laws says what the best coupling would accept.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import msgspec
import torch
from torch import Tensor

from specserve.training.lessons import Lesson
from specserve.training.losses import parts
from specserve.training.students import Student


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """Per depth, from the first guess.

    accepted: greedy texts: share of guesses that are right where all before them are
    overlap:  all texts: what the best coupling accepts, the text so far given
    tokens_per_step: greedy texts, as many guesses in each step, the extra token included
    num_tokens: places looked at
    """

    accepted: tuple[float, ...]
    overlap: tuple[float, ...]
    tokens_per_step: float
    num_tokens: int


def judge(student: Student, lessons: Iterable[Lesson], temperature: float) -> HeldOut:
    """temperature: of the laws in the lessons."""
    tried = torch.zeros(student.num_depths)
    right = torch.zeros(student.num_depths)
    shared = torch.zeros(student.num_depths)
    counted = torch.zeros(student.num_depths)
    num_steps = num_tokens = num_greedy = 0
    for lesson in lessons:
        hits, overlaps = _grids(student, lesson, temperature)
        places = torch.arange(hits.shape[1])
        num_tokens += int(lesson.num_places.sum())
        for depth in range(hits.shape[2]):
            valid = places < (lesson.num_places - depth)[:, None]
            shared[depth] += overlaps[..., depth][valid].sum()
            counted[depth] += valid.sum()
            before = hits[..., :depth].all(dim=2) & valid & lesson.is_greedy[:, None]
            tried[depth] += before.sum()
            right[depth] += (before & hits[..., depth]).sum()
        runs = hits.cumprod(dim=2).sum(dim=2)  # [B, R]
        for row in lesson.is_greedy.nonzero()[:, 0].tolist():
            count = int(lesson.num_places[row])
            num_greedy += count
            num_steps += steps_of(runs[row, :count].tolist())
    return HeldOut(
        accepted=_ratio(right, tried),
        overlap=_ratio(shared, counted),
        tokens_per_step=num_greedy / num_steps if num_steps else 0.0,
        num_tokens=num_tokens,
    )


def steps_of(runs: Seq[int]) -> int:
    """Steps that emit all places, where a step at place r accepts runs[r] guesses and adds one."""
    place = steps = 0
    while place < len(runs):
        place += runs[place] + 1
        steps += 1
    return steps


@torch.inference_mode()
def _grids(student: Student, lesson: Lesson, temperature: float) -> tuple[Tensor, Tensor]:
    """[B, R, K] by (document, place where the step begins, depth): is right, and overlap."""
    num_docs, num_places = lesson.answers.shape
    hits = torch.zeros(num_docs, num_places, student.num_depths, dtype=torch.bool)
    overlaps = torch.zeros(num_docs, num_places, student.num_depths)
    target_ids = student.target_ids.to(lesson.answers.device)
    for depth, documents, places, logits in student.guesses(lesson):
        chosen = target_ids[logits.argmax(dim=1)]
        law = lesson.law_at(documents, places)
        overlap = parts(logits, law, temperature).overlap
        hits[documents, places - depth, depth] = chosen == lesson.answers[documents, places]
        overlaps[documents, places - depth, depth] = overlap.float()
    if not student.reads_itself:  # what was guessed at a place, whatever the depth
        for depth in range(1, min(student.num_depths, num_places)):
            hits[:, : num_places - depth, depth] = hits[:, depth:, 0]
            overlaps[:, : num_places - depth, depth] = overlaps[:, depth:, 0]
    return hits, overlaps


def _ratio(parts_of: Tensor, wholes: Tensor) -> tuple[float, ...]:
    return tuple((parts_of / wholes.clamp(min=1)).tolist())
