"""The random bits of specserve.noise on a device: Philox4x64-10, the same bits as numpy's.

A word's block b has the counter (b + 1, part, position, purpose), as numpy counts; the key is the
seed's 64 bits and its sign. Part 0 packs the 16 leading bits of 16 tokens into a block, part 1 the
48 trailing ones of 4. So a tile of tokens costs a block per 16 of them, and only the few that can
still win cost one more.

A cell is a uniform's 16 leading bits. It bounds the Gumbel noise of its token from both sides:
`gumbel_at` in fp32, good to SLACK with a GPU's fast logarithm. `gumbel_of` is the noise itself.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

NUM_CELLS: Final = tl.constexpr(65536)
SLACK: Final = tl.constexpr(0.0625)  # of two bounds, and of fp32 weights within 64 of the best
_HIGHEST: Final = tl.constexpr(45.1)  # no Gumbel of 64 bits exceeds 45.06
_LOWEST: Final = tl.constexpr(-3.61)  # that of the largest double below 1
_LARGEST_UNIFORM: Final = tl.constexpr(1.0 - 2.0**-53)
_ROUND_0: Final = tl.constexpr(0xD2E7470EE14C6C93)
_ROUND_1: Final = tl.constexpr(0xCA5A826395121157)
_WEYL_0: Final = tl.constexpr(0x9E3779B97F4A7C15)
_WEYL_1: Final = tl.constexpr(0xBB67AE8584CAA73B)


@triton.jit
def philox(blocks, part, position, purpose, key_0, key_1):
    """The four 64-bit words of each of [n] blocks. key_0, key_1: scalar uint64."""
    c0 = blocks.to(tl.uint64) + 1
    c1 = tl.zeros_like(c0) + part
    c2 = tl.zeros_like(c0) + position
    c3 = tl.zeros_like(c0) + purpose
    m0 = tl.full(c0.shape, _ROUND_0, tl.uint64)
    m1 = tl.full(c0.shape, _ROUND_1, tl.uint64)
    for _ in tl.static_range(10):
        high_0, low_0 = tl.umulhi(m0, c0), m0 * c0
        high_1, low_1 = tl.umulhi(m1, c2), m1 * c2
        c0 = high_1 ^ c1 ^ key_0
        c1 = low_1
        c2 = high_0 ^ c3 ^ key_1
        c3 = low_0
        key_0 = key_0 + _WEYL_0
        key_1 = key_1 + _WEYL_1
    return c0, c1, c2, c3


@triton.jit
def load_key(seeds_ptr, row):
    """seeds_ptr [L, 2] int64 -> the row's key as two uint64."""
    at = seeds_ptr + row.to(tl.int64) * 2
    return tl.load(at).to(tl.uint64), tl.load(at + 1).to(tl.uint64)


@triton.jit
def tile_cells(first_token, position, purpose, key_0, key_1, TILE: tl.constexpr):
    """[TILE] int32 cells of tokens first_token.. ; both are multiples of 16."""
    blocks = first_token // 16 + tl.arange(0, TILE // 16)
    w0, w1, w2, w3 = philox(blocks, 0, position, purpose, key_0, key_1)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (TILE // 4,))  # w0 w1 w2 w3
    low, high = words & 0xFFFFFFFF, words >> 32
    pairs = tl.reshape(tl.join(low.to(tl.int64), high.to(tl.int64)), (TILE // 2,))
    cells = tl.join(pairs & 0xFFFF, pairs >> 16)
    return tl.reshape(cells, (TILE,)).to(tl.int32)


@triton.jit
def _word(words_0, words_1, words_2, words_3, which):
    even = tl.where(which == 0, words_0, words_2)
    odd = tl.where(which == 1, words_1, words_3)
    return tl.where(which % 2 == 0, even, odd)


@triton.jit
def cells_of(ids, position, purpose, key_0, key_1):
    """[n] int32 cells of tokens ids [n], wherever they are."""
    w0, w1, w2, w3 = philox(ids // 16, 0, position, purpose, key_0, key_1)
    word = _word(w0, w1, w2, w3, ids % 16 // 4)
    return ((word >> (ids % 4 * 16).to(tl.uint64)) & 0xFFFF).to(tl.int32)


@triton.jit
def uniforms_of(ids, cells, position, purpose, key_0, key_1):
    """[n] fp64 in (0, 1): the uniforms of tokens ids [n], whose cells are known."""
    w0, w1, w2, w3 = philox(ids // 4, 1, position, purpose, key_0, key_1)
    trailing = _word(w0, w1, w2, w3, ids % 4) >> 16
    fraction = (trailing.to(tl.float64) + 0.5) * (1.0 / (1 << 48))
    uniform = (cells.to(tl.float64) + fraction) * (1.0 / (1 << 16))
    return tl.where(uniform > _LARGEST_UNIFORM, _LARGEST_UNIFORM, uniform)


@triton.jit
def accept_uniform(position, purpose, key_0, key_1):
    """[n] fp64 in (0, 1): what the accept tests at [n] int64 positions compare with."""
    w0, _w1, _w2, _w3 = philox(tl.zeros_like(position), 0, position, purpose, key_0, key_1)
    return ((w0 >> 11).to(tl.float64) + 0.5) * (1.0 / (1 << 53))


@triton.jit
def gumbel_of(uniform):
    """[n] fp64 Gumbel noise of uniforms in (0, 1), precise where they are tiny."""
    # log1p of -u: what 1 - u rounds away is put back by the quotient (Kahan).
    rest = 1.0 - uniform
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    exponential = tl.where(rest == 1.0, uniform, -tl.log(rest) * (uniform / lost))
    return -tl.log(exponential)


@triton.jit
def gumbel_at(step):
    """[n] fp32 Gumbel noise of the uniform step / 2^16; step: [n] int32, 0 to 2^16 included."""
    inside = (step > 0) & (step < NUM_CELLS)
    uniform = tl.where(inside, step, NUM_CELLS // 2).to(tl.float32) * (1.0 / (1 << 16))
    bound = -tl.log(-tl.log(1.0 - uniform))
    return tl.where(step <= 0, _HIGHEST, tl.where(inside, bound, _LOWEST))
