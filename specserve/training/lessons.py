"""Answers as batches that a draft learns from.

A place of an answer is numbered from 0: place l is where the target, knowing the prompt and the
first l + 1 tokens of its answer, chooses the next. (The very first token of an answer comes out of
the prompt's forward, before any guess, so it is no place.) A guess at depth k in a step that begins
at place r concerns place r + k, so all that is said about places fits one grid [B, R].
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from specserve.training.losses import Law

WINDOW = 16  # batches whose documents are sorted by length together


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the target's answer, which may end in EOS.

    doc_id: its number among all answers
    """

    doc_id: int
    prompt_idx: int
    temperature: float
    prompt_len: int
    token_ids: tuple[int, ...]

    @property
    def answer_ids(self) -> tuple[int, ...]:
        return self.token_ids[self.prompt_len :]

    @property
    def num_places(self) -> int:
        return max(0, len(self.token_ids) - self.prompt_len - 1)


class Lesson(NamedTuple):
    """B documents, T tokens of the longest, R places of the most, A hidden layers, D width.

    token_ids:  [B, T] int64, padded on the right with 0
    starts:     [B] prompt lengths
    num_places: [B]
    states:     [B, T, A, D] the target's; None for drafts that read none
    laws:       of [B, R, M] and [B, R]; junk beyond num_places
    answers:    [B, R] the token that the text has at each place
    is_greedy:  [B] bool
    """

    token_ids: Tensor
    starts: Tensor
    num_places: Tensor
    states: Tensor | None
    laws: Law
    answers: Tensor
    is_greedy: Tensor

    def places(self, depth: int) -> tuple[Tensor, Tensor]:
        """(document, place) [n] each, of every place that a guess at this depth concerns."""
        at = torch.arange(self.answers.shape[1], device=self.answers.device)
        wanted = (at >= depth) & (at < self.num_places[:, None])
        documents, places = wanted.nonzero(as_tuple=True)
        return documents, places

    def law_at(self, documents: Tensor, places: Tensor) -> Law:
        return Law(*(part[documents, places] for part in self.laws))

    def to(self, device: torch.device) -> Lesson:
        laws = Law(*(part.to(device) for part in self.laws))
        states = None if self.states is None else self.states.to(device)
        return Lesson(
            self.token_ids.to(device),
            self.starts.to(device),
            self.num_places.to(device),
            states,
            laws,
            self.answers.to(device),
            self.is_greedy.to(device),
        )


class Studied(NamedTuple):
    """What the target says about one document.

    states: [T, A, D] bf16 (the dtype they are kept in), or None
    law:    of [n, M], n places
    """

    document: Document
    states: Tensor | None
    law: Law


def make_lesson(studied: Seq[Studied], state_dtype: torch.dtype = torch.float32) -> Lesson:
    documents = [one.document for one in studied]
    longest = max(len(one.token_ids) for one in documents)
    most = max(one.num_places for one in documents)
    token_ids = torch.zeros(len(documents), longest, dtype=torch.int64)
    answers = torch.zeros(len(documents), most, dtype=torch.int64)
    for row, one in enumerate(documents):
        token_ids[row, : len(one.token_ids)] = torch.tensor(one.token_ids)
        answers[row, : one.num_places] = torch.tensor(one.answer_ids[1:])
    states = None
    if studied[0].states is not None:
        states = _padded([s.states for s in studied if s.states is not None], longest)
        states = states.to(state_dtype)
    law = Law(*(_padded([one.law[part] for one in studied], most) for part in range(3)))
    return Lesson(
        token_ids=token_ids,
        starts=torch.tensor([one.prompt_len for one in documents]),
        num_places=torch.tensor([one.num_places for one in documents]),
        states=states,
        laws=law,
        answers=answers,
        is_greedy=torch.tensor([one.temperature == 0 for one in documents]),
    )


def _padded(parts: Seq[Tensor], length: int) -> Tensor:
    """[n_i, ...] each -> [B, length, ...] with zeros behind."""
    out = parts[0].new_zeros(len(parts), length, *parts[0].shape[1:])
    for row, part in enumerate(parts):
        out[row, : len(part)] = part
    return out


def batches(
    documents: Seq[Document], *, batch_tokens: int, seed: int, epoch: int
) -> list[list[Document]]:
    """All documents once, in batches of at most batch_tokens (padding counted), shuffled.

    A function of its arguments alone, so a run can go on anywhere.
    """
    chance = random.Random(f"{seed}/{epoch}")
    shuffled = list(documents)
    chance.shuffle(shuffled)
    found: list[list[Document]] = []
    window: list[Document] = []
    for document in shuffled:
        window.append(document)
        if sum(len(one.token_ids) for one in window) >= WINDOW * batch_tokens:
            found += _packed(window, batch_tokens)
            window = []
    found += _packed(window, batch_tokens)
    chance.shuffle(found)
    return found


def _packed(window: Seq[Document], batch_tokens: int) -> list[list[Document]]:
    """Similar lengths together."""
    found: list[list[Document]] = []
    for document in sorted(window, key=lambda one: (len(one.token_ids), one.doc_id)):
        length = len(document.token_ids)  # the longest so far
        if found and (len(found[-1]) + 1) * length <= batch_tokens:
            found[-1].append(document)
        else:
            found.append([document])
    return found


def split(
    documents: Seq[Document], *, held_out: float, seed: int
) -> tuple[list[Document], list[Document]]:
    """(to learn from, held out): by prompt, so that no prompt is in both. At least one each."""
    prompts = sorted({one.prompt_idx for one in documents})
    count = min(max(1, round(held_out * len(prompts))), len(prompts) - 1)
    chosen = set(random.Random(f"{seed}/held out").sample(prompts, count))
    usable = [one for one in documents if one.num_places > 0]
    return (
        [one for one in usable if one.prompt_idx not in chosen],
        [one for one in usable if one.prompt_idx in chosen],
    )
