"""Which tokens of a reply were guessed, by whom, and what else was guessed there.

For `return_token_origins`. A token's text is what the text grows by, so that the texts of all
tokens join to the whole output, stop strings and what may be marks of calls or reasoning included.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from msgspec import UNSET, UnsetType

from specserve.server.replies import Origin, RejectedGuess, StepOrigins, TokenOrigin
from specserve.tokenizer import Tokenizer
from specserve.types import Guesses, StepTrace, TokenChunk


class OriginReader:
    """One choice's chunks, in order."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream_decoder(skip_special_tokens)

    def read(self, chunk: TokenChunk) -> list[StepOrigins]:
        steps = []
        at = 0
        for step in chunk.steps:
            token_ids = chunk.token_ids[at : at + step.num_tokens]
            at += step.num_tokens
            is_last = at == len(chunk.token_ids) and chunk.finish_reason is not None
            steps.append(self._step(step, token_ids, is_last=is_last))
        return steps

    def _step(self, step: StepTrace, token_ids: Seq[int], *, is_last: bool) -> StepOrigins:
        texts = [self._decoder.push(token_id) for token_id in token_ids]
        if is_last:
            texts[-1] += self._decoder.finish()
        guesses = step.guesses
        return StepOrigins(
            step=step.step_idx,
            drafter=step.drafter,
            drafted=len(guesses.token_ids),
            accepted=step.num_accepted,
            reason=step.reason or UNSET,
            tokens=[
                _accepted(token_id, text, guesses, at)
                if at < step.num_accepted
                else TokenOrigin(id=token_id, text=text, origin=_own(guesses))
                for at, (token_id, text) in enumerate(zip(token_ids, texts, strict=True))
            ],
            rejected=self._rejected(guesses),
        )

    def _rejected(self, guesses: Guesses) -> list[RejectedGuess]:
        """A guess that was right, but cut off behind a stop, is not among them."""
        positions: list[int] = []
        for parent in guesses.parents:
            positions.append(0 if parent < 0 else positions[parent] + 1)
        return [
            RejectedGuess(
                id=token_id,
                text=self._tokenizer.token_text(token_id),
                position=positions[at],
                probability=_probability(guesses, at),
            )
            for at, token_id in enumerate(guesses.token_ids)
            if at not in guesses.path
        ]


def _accepted(token_id: int, text: str, guesses: Guesses, at: int) -> TokenOrigin:
    """at: how many accepted guesses come before it"""
    return TokenOrigin(
        id=token_id,
        text=text,
        origin="accepted",
        position=at,
        probability=_probability(guesses, guesses.path[at]),
    )


def _own(guesses: Guesses) -> Origin:
    """Of the token that the target chose behind the accepted guesses."""
    if not guesses.token_ids:
        return "plain"
    last = guesses.path[-1] if guesses.path else -1
    return "corrected" if last in guesses.parents else "bonus"


def _probability(guesses: Guesses, at: int) -> float | UnsetType:
    return float(guesses.scores[at]) if guesses.scores else UNSET
