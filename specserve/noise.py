"""Counter-based noise: every random number is a pure function of what it is for.

The key is (request seed, absolute position, purpose) and the index is the token id (for guesses and
their tests the position is that of the step, with the place in the draft: `at_node`); Philox turns
them into bits, so no generator has a state that a cancelled neighbour, a preemption or a different
draft length could move. Purposes are separate streams: a guess, the test that accepts it and the
draw after a rejection must be independent, or the law of the output is bent.

A token's uniform has 64 bits in two parts. The 16 leading bits of all tokens come packed four to a
word and are cheap; the 48 trailing bits are looked up one token at a time. A draw over V tokens
needs the cheap part of all and the rest of one or two: for V = 49,152 that is 98 us of random bits
instead of 490 us, and no logarithms instead of 500 us of them (one core of 2, x86 with AVX-512).
`gumbel` is the plain form that `race` must agree with.
"""

from __future__ import annotations

import math
from enum import IntEnum
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from numpy.random._philox import _PhiloxState

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Floats = NDArray[np.float32] | NDArray[np.float64]
Ids = NDArray[np.intp]

MIN_SEED: Final = -(2**63)
MAX_SEED: Final = 2**64 - 1

_LEADING, _TRAILING = 0, 1  # which part of the 64 bits
_CELLS: Final = 2**16
_LARGEST_UNIFORM: Final = 1.0 - 2.0**-53  # the largest double below 1
_SMALLEST_UNIFORM: Final = 2.0**-65  # half a step of the 64 bits: a Gumbel never exceeds 45.06


class Purpose(IntEnum):
    """Which independent stream."""

    TARGET = 0  # the token itself, and proposals coupled to it
    DRAFT = 1  # guesses that are accepted by a test, not by equality
    ACCEPT = 2  # that test
    RESIDUAL = 3  # the token after a failed test


_NODE_SHIFT: Final = 40  # far above any position


def at_node(base: int, node: int) -> int:
    """The `position` of a draw that belongs to one place of one step's draft.

    base: the position of the step's first guess, which no two steps of a request share
    node: which place of the draft; 0 to 2^23 - 1

    DRAFT and ACCEPT draws need it wherever a verdict may have looked at noise of later positions or
    of other branches and thrown it away: what has been looked at is no longer random, so the next
    step must not meet it again at the same absolute position.
    """
    return base + (node << _NODE_SHIFT)


def gumbel_of(uniform: F64) -> F64:
    """[n] standard Gumbel noise of uniforms in (0, 1), precise in the long right tail (u near 0).

    One by one through the C library's logarithms, which the native sampler calls, too: numpy's own
    differ from them, and from machine to machine, in the last bit.
    """
    return np.array([-math.log(-math.log1p(-u)) for u in uniform.tolist()], dtype=np.float64)


def _cell_bounds() -> tuple[F32, F32]:
    """Lowest and highest Gumbel, [2^16] each, of a uniform whose 16 leading bits are the index."""
    cells = np.arange(_CELLS + 1, dtype=np.float64) / _CELLS
    clipped = np.clip(cells, _SMALLEST_UNIFORM, _LARGEST_UNIFORM)
    bounds = (-np.log(-np.log1p(-clipped))).astype(np.float32)
    return bounds[1:], bounds[:-1]


_CELL_LOW, _CELL_HIGH = _cell_bounds()
_WIDEST_CELL: Final = float((_CELL_HIGH - _CELL_LOW)[1:].max())  # without cell 0, the long tail
_HIGHEST_IN_CELL_1: Final = float(_CELL_HIGH[1])
_ROUNDING: Final = 1e-3  # generous: the bounds are fp32 and of size <= 46 where they matter


class Noise:
    """A scratch Philox whose key and counter are set before every read, so no state survives one.

    Create one per call on the thread that uses it; creating costs 16 us, a read 5 us.
    """

    def __init__(self) -> None:
        self._philox = np.random.Philox(key=0)
        self._counter = np.zeros(4, dtype=np.uint64)
        self._key = np.zeros(2, dtype=np.uint64)
        self._state: _PhiloxState = {
            "bit_generator": "Philox",
            "state": {"counter": self._counter, "key": self._key},
            "buffer": np.zeros(4, dtype=np.uint64),
            "buffer_pos": 4,  # empty: the next read starts a block
            "has_uint32": 0,
            "uinteger": 0,
        }

    def _words(
        self, seed: int, position: int, purpose: int, part: int, start: int, n: int
    ) -> NDArray[np.uint64]:
        """n words of 64 bits from block `start` (four words each) of one stream."""
        self._counter[:] = (start, part, position, purpose)
        self._key[:] = (seed & MAX_SEED, seed < 0)  # -1 and 2^64 - 1 are different seeds
        self._philox.state = self._state
        return self._philox.random_raw(n)

    def leading_bits(
        self, seed: int, position: int, purpose: Purpose, n: int
    ) -> NDArray[np.uint16]:
        """[n] the 16 leading bits of tokens 0..n-1; a token's bits do not depend on n."""
        words = self._words(seed, position, purpose, _LEADING, 0, (n + 3) // 4)
        return words.astype("<u8", copy=False).view("<u2")[:n]

    def uniform(self, seed: int, position: int, purpose: Purpose, n: int) -> F64:
        """[n] float64 in (0, 1) for tokens 0..n-1, with 64 random bits each."""
        cells = self.leading_bits(seed, position, purpose, n)
        trailing = self._words(seed, position, purpose, _TRAILING, 0, n)
        return _join(cells, trailing)

    def accept_uniform(self, seed: int, position: int) -> float:
        """The number in (0, 1) that the accept test at `position` compares with: one word's."""
        word = int(self._words(seed, position, Purpose.ACCEPT, _LEADING, 0, 1)[0])
        return ((word >> 11) + 0.5) * 2.0**-53

    def uniform_of(
        self, seed: int, position: int, purpose: Purpose, ids: Ids, cells: NDArray[np.uint16]
    ) -> F64:
        """[n] the uniforms of tokens `ids` [n], whose leading bits `cells` [n] are known."""
        trailing = np.empty(len(ids), dtype=np.uint64)
        for idx, token_id in enumerate(ids.tolist()):
            block, word = divmod(token_id, 4)
            trailing[idx] = self._words(seed, position, purpose, _TRAILING, block, word + 1)[word]
        return _join(cells, trailing)


def _join(cells: NDArray[np.uint16], trailing: NDArray[np.uint64]) -> F64:
    """(leading bits, 48 of the trailing word's bits) -> the uniform at the middle of its step."""
    fraction = ((trailing >> np.uint64(16)).astype(np.float64) + 0.5) * 2.0**-48
    result: F64 = np.minimum((cells + fraction) / _CELLS, _LARGEST_UNIFORM)
    return result


def uniform(seed: int, position: int, purpose: Purpose, n: int) -> F64:
    """[n] float64 in (0, 1): the uniforms of tokens 0..n-1. Seeds are in [-2^63, 2^64)."""
    return Noise().uniform(seed, position, purpose, n)


def exponential(seed: int, position: int, purpose: Purpose, n: int) -> F64:
    """[n] float64 > 0: standard exponential noise, tails down to 2^-65."""
    result: F64 = -np.log1p(-uniform(seed, position, purpose, n))
    return result


def gumbel(seed: int, position: int, purpose: Purpose, n: int) -> F64:
    """[n] float64: standard Gumbel noise, g(v) = -log(exponential(v))."""
    return gumbel_of(uniform(seed, position, purpose, n))


def race(
    log_weights: Floats,
    *,
    seed: int,
    position: int,
    purpose: Purpose,
    ids: Ids | None = None,
    noise: Noise | None = None,
) -> int:
    """argmax over tokens of log weight + Gumbel noise: one exact draw from softmax(log_weights).

    log_weights: [n] finite or -inf, at least one finite; need not be normalised
    ids:         [n] ascending token ids of the entries; None: entry v is token v
    returns:     the winner's token id, the lowest among equals

    Equal to np.argmax(log_weights + gumbel(...)), but the noise of a token that cannot win any more
    is never computed: its 16 leading bits bound it from above, and the largest lower bound of all
    tokens is the bar to pass.
    """
    noise = noise or Noise()
    num_tokens = len(log_weights) if ids is None else int(ids[-1]) + 1
    cells = noise.leading_bits(seed, position, purpose, num_tokens)
    if ids is not None:
        cells = cells[ids]
    top = int(log_weights.argmax())
    gap = (log_weights - log_weights[top]).astype(np.float32, copy=False)  # [n] <= 0

    # Outside cell 0 no noise exceeds 11.1, so most of a vocabulary is out by its weight alone.
    bar = float(_CELL_LOW[cells[top]]) - _ROUNDING
    alive = gap >= bar - _HIGHEST_IN_CELL_1
    if np.count_nonzero(alive) * 8 > len(gap):  # a flat distribution: bound them all at once
        lowest = gap + _CELL_LOW[cells]
        alive = lowest >= float(lowest.max()) - _WIDEST_CELL - _ROUNDING
    near = np.flatnonzero(alive | (cells == 0))
    lowest = gap[near] + _CELL_LOW[cells[near]]
    bar = float(lowest.max()) - _ROUNDING
    near = near[gap[near] + _CELL_HIGH[cells[near]] >= bar]
    winners = near if ids is None else ids[near]
    if len(winners) == 1:
        return int(winners[0])
    exact = noise.uniform_of(seed, position, purpose, winners, cells[near])
    scores = log_weights[near].astype(np.float64) + gumbel_of(exact)
    return int(winners[int(scores.argmax())])
