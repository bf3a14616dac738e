"""What the loop needs of a draft in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

from torch import Tensor

from specserve.training.layers import Params
from specserve.training.lessons import Lesson


class Guesses(NamedTuple):
    """Logits [n, W] of guesses at one depth about n places (document, place) [n] each."""

    depth: int
    documents: Tensor
    places: Tensor
    logits: Tensor


class Deep(NamedTuple):
    """Places p with (p + phase) % every == 0."""

    every: int
    phase: int


ALL: Final = Deep(1, 0)


class Student(Protocol):
    """kind: as --kind; params: by the checkpoint's names, leaf tensors

    hidden_layers: target layers whose incoming state it reads, ascending; () for none
    target_ids:    [W] what its logits stand for
    num_depths:    guesses in a row that it is taught, and judged by
    reads_itself:  whether depth changes its input (its own states are fed back). Else one forward
                   over the text says what it guesses at any depth
    """

    kind: str
    params: Params
    hidden_layers: tuple[int, ...]
    target_ids: Tensor
    num_depths: int
    reads_itself: bool

    def guesses(self, lesson: Lesson, deep: Deep = ALL) -> Iterator[Guesses]:
        """Depth by depth, each time the text's own token having followed.

        deep: which places go on behind their first guess; who does not read itself may go on with
        all, for it costs nothing
        """
        ...

    def config(self) -> dict[str, object]:
        """config.json of the public format."""
        ...

    def constants(self) -> dict[str, Tensor]:
        """Tensors of the checkpoint that are not learned."""
        ...
