"""The target's own answers, kept as token ids in shards of one round each.

A draft must learn what this target says, so prompts are answered by the engine that serves. What a
request gets depends on (prompt, temperature, seed) alone, and those on (seed, number) alone: so a
run that was stopped goes on with the next round and ends with the same answers.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specserve.errors import ConfigError, ModelError
from specserve.training.lessons import Document
from specserve.types import SamplingParams

_PATTERN = "round-*.safetensors"


class Ask(Protocol):
    """Prompts' ids and how to choose -> the answers' ids, in order."""

    def __call__(
        self, prompts: Seq[Seq[int]], params: Seq[SamplingParams]
    ) -> list[tuple[int, ...]]: ...


class AnswerStore:
    """Shards in one directory; each appears whole or not at all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def num_rounds(self) -> int:
        return len(list(self._directory.glob(_PATTERN)))

    def append(self, round_idx: int, documents: Seq[Document]) -> None:
        flat = [token_id for one in documents for token_id in one.token_ids]
        tensors = {
            "token_ids": torch.tensor(flat, dtype=torch.int32),
            "lengths": torch.tensor([len(one.token_ids) for one in documents], dtype=torch.int32),
            "prompt_lens": torch.tensor([one.prompt_len for one in documents], dtype=torch.int32),
            "prompt_idxs": torch.tensor([one.prompt_idx for one in documents], dtype=torch.int32),
            "temperatures": torch.tensor(
                [one.temperature for one in documents], dtype=torch.float64
            ),
        }
        path = self._directory / f"round-{round_idx:06}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(tensors, partial)
        os.replace(partial, path)

    def load(self) -> list[Document]:
        """All answers, numbered in the order in which they were asked for."""
        documents: list[Document] = []
        for path in sorted(self._directory.glob(_PATTERN)):
            with safe_open(path, framework="pt", device="cpu") as file:
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            token_ids = columns["token_ids"].split(columns["lengths"].tolist())
            for row, own in enumerate(token_ids):
                documents.append(
                    Document(
                        doc_id=len(documents),
                        prompt_idx=int(columns["prompt_idxs"][row]),
                        temperature=float(columns["temperatures"][row]),
                        prompt_len=int(columns["prompt_lens"][row]),
                        token_ids=tuple(own.tolist()),
                    )
                )
        return documents


class Plan:
    """Which prompt is asked when, and how."""

    def __init__(
        self,
        prompts: Seq[Seq[int]],
        *,
        temperatures: Seq[float],
        max_answer: int,
        max_length: int,
        seed: int,
    ) -> None:
        """prompts: ids. ConfigError where none leaves room for an answer of 8 tokens."""
        self._prompts = [(i, ids) for i, ids in enumerate(prompts) if len(ids) + 8 <= max_length]
        self._temperatures = tuple(temperatures)
        self._sampled = tuple(t for t in temperatures if t > 0)
        self._max_answer = max_answer
        self._max_length = max_length
        self._seed = seed
        if not self._prompts:
            raise ConfigError(
                f"--data has no prompt of at most {max_length - 8} tokens: raise --max-length "
                f"({max_length}) or give shorter prompts"
            )

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def limit(self) -> int | None:
        """How many answers differ from one another; None: no end, some are sampled."""
        return None if self._sampled else len(self._prompts)

    def at(self, number: int) -> tuple[int, Seq[int], SamplingParams]:
        """(prompt_idx, its ids, params). All prompts once, then again with other temperatures, and
        from there on only with those that give another answer each time.
        """
        turn, place = divmod(number, len(self._prompts))
        prompt_idx, ids = self._prompts[place]
        if turn < len(self._temperatures):
            temperature = self._temperatures[(place + turn) % len(self._temperatures)]
        else:
            temperature = self._sampled[(place + turn) % len(self._sampled)]
        params = SamplingParams(
            temperature=temperature,
            max_tokens=min(self._max_answer, self._max_length - len(ids)),
            seed=random.Random(f"{self._seed}/{number}").getrandbits(62),
        )
        return prompt_idx, ids, params


def generate(
    plan: Plan,
    store: AnswerStore,
    ask: Ask,
    *,
    num_tokens: int,
    round_size: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[Document]:
    """Ask until the store holds num_tokens tokens of answers, or nothing new can be asked.

    progress is called with the tokens of each round, those of an earlier run first.
    """
    documents = store.load()
    have = sum(len(one.answer_ids) for one in documents)
    progress(have)
    for round_idx in range(store.num_rounds, 2**31):
        numbers = range(round_idx * round_size, (round_idx + 1) * round_size)
        if plan.limit is not None:
            numbers = range(numbers.start, min(numbers.stop, plan.limit))
        if have >= num_tokens or not numbers:
            break
        if len(documents) != numbers.start:
            raise ModelError(
                f"the store holds {len(documents)} answers where {numbers.start} were expected: a "
                "shard is missing; begin again with another --out"
            )
        asked = [plan.at(number) for number in numbers]
        answers = ask([ids for _, ids, _ in asked], [params for _, _, params in asked])
        fresh = [
            Document(
                doc_id=number,
                prompt_idx=prompt_idx,
                temperature=params.temperature,
                prompt_len=len(ids),
                token_ids=(*ids, *answer),
            )
            for number, (prompt_idx, ids, params), answer in zip(
                numbers, asked, answers, strict=True
            )
        ]
        store.append(round_idx, fresh)
        documents += fresh
        new = sum(len(one.answer_ids) for one in fresh)
        have += new
        progress(new)
    return documents
