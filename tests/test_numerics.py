"""Bits, not tolerances: a row's numbers do not depend on what shares its step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specserve.models.decoder import Decoder, silu
from specserve.models.linear import BASE_ROWS, GemmWeight, RowInvariantLinear, measure_call_sizes
from specserve.models.rope import cos_sin
from specserve_kernels import PagedBatch
from tests.tiny_models import tiny_decoder

BLOCK = 4
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
THREADS = [1, 2, 3]


@pytest.fixture(params=THREADS)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Part(NamedTuple):
    """`num_tokens` tokens of sequence `seq_idx` computed in one step."""

    seq_idx: int
    num_tokens: int


class Texts:
    """Sequences of one decoder in one shuffled pool, computed in any portions."""

    def __init__(self, decoder: Decoder, sequences: list[list[int]]) -> None:
        self.decoder = decoder
        self.sequences = sequences
        sizes = [-(-len(ids) // BLOCK) + 8 for ids in sequences]
        pool = random.Random(0).sample(range(sum(sizes)), sum(sizes))
        self.tables = [tuple(pool.pop() for _ in range(size)) for size in sizes]
        self.cache = decoder.new_kv_cache(sum(sizes), BLOCK)
        self.num_computed = [0] * len(sequences)
        self.logits: list[list[Tensor]] = [[] for _ in sequences]

    def step(self, parts: list[Part]) -> None:
        ids, positions, starts = [], [], [0]
        for seq_idx, num_tokens in parts:
            first = self.num_computed[seq_idx]
            ids += self.sequences[seq_idx][first : first + num_tokens]
            positions += range(first, first + num_tokens)
            starts.append(len(ids))
        batch = PagedBatch(
            query_start_loc=tuple(starts),
            context_lens=tuple(self.num_computed[part.seq_idx] for part in parts),
            block_tables=tuple(self.tables[part.seq_idx] for part in parts),
            parents=(None,) * len(parts),
            block_size=BLOCK,
        )
        out = self.forward(ids, positions, batch)
        for (seq_idx, num_tokens), start in zip(parts, starts[:-1], strict=True):
            self.logits[seq_idx].append(out[start : start + num_tokens])
            self.num_computed[seq_idx] += num_tokens

    def forward(self, ids: list[int], positions: list[int], batch: PagedBatch) -> Tensor:
        with torch.inference_mode():
            return self.decoder.forward(
                torch.tensor(ids), torch.tensor(positions), batch, self.cache, range(len(ids))
            )

    def left(self, seq_idx: int) -> int:
        return len(self.sequences[seq_idx]) - self.num_computed[seq_idx]

    def all_logits(self) -> list[Tensor]:
        """Per sequence [its length, V]."""
        return [torch.cat(parts) for parts in self.logits]


def token_by_token(texts: Texts) -> list[Tensor]:
    for seq_idx, ids in enumerate(texts.sequences):
        for _ in ids:
            texts.step([Part(seq_idx, 1)])
    return texts.all_logits()


def in_random_portions(texts: Texts, chance: random.Random, most: int) -> list[Tensor]:
    while live := [idx for idx in range(len(texts.sequences)) if texts.left(idx)]:
        chosen = chance.sample(live, chance.randint(1, len(live)))
        texts.step([Part(idx, min(chance.randint(1, most), texts.left(idx))) for idx in chosen])
    return texts.all_logits()


def some_sequences(chance: random.Random, count: int, longest: int) -> list[list[int]]:
    return [[chance.randrange(64) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def num_rows_that_differ(left: list[Tensor], right: list[Tensor]) -> int:
    return sum(int((a != b).any(1).sum()) for a, b in zip(left, right, strict=True))


SHAPES: dict[str, dict[str, int]] = {
    "tiny": {},
    "odd widths": {"hidden": 60, "heads": 6, "kv_heads": 3, "intermediate": 33},
    "window": {"window": 50},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_do_not_depend_on_chunks_and_batch_mates(
    shape: str, dtype: torch.dtype, threads: int
) -> None:
    decoder = tiny_decoder(dtype=dtype, **SHAPES[shape])  # type: ignore[arg-type]  # ints all
    chance = random.Random(threads)
    sequences = some_sequences(chance, count=4, longest=150)
    alone = token_by_token(Texts(decoder, sequences))
    for most in (4, 40, 150):
        together = in_random_portions(Texts(decoder, sequences), chance, most)
        assert num_rows_that_differ(alone, together) == 0, most


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_a_mid_size_model_do_not_depend_on_batch_mates(dtype: torch.dtype) -> None:
    """The demo model's widths: other GEMM paths than a tiny model takes."""
    decoder = tiny_decoder(
        vocab=1024, dtype=dtype, hidden=576, heads=9, kv_heads=3, intermediate=1536
    )
    chance = random.Random(0)
    sequences = some_sequences(chance, count=5, longest=60)
    alone = token_by_token(Texts(decoder, sequences))
    for most in (5, 60):
        together = in_random_portions(Texts(decoder, sequences), chance, most)
        assert num_rows_that_differ(alone, together) == 0, most


TREE = (-1, 0, 0, 1, 1, 2, 5, 3, -1, 8)  # parents; -1 continues the last known token


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("prompt_len", [3, 30, 121, 127, 128, 140])
def test_a_node_of_a_tree_has_the_bits_of_the_same_node_in_a_chain(
    prompt_len: int, dtype: torch.dtype
) -> None:
    decoder = tiny_decoder(dtype=dtype)
    chance = random.Random(prompt_len)
    prompt = [chance.randrange(64) for _ in range(prompt_len)]
    guesses = [chance.randrange(64) for _ in TREE]
    # The verify row: the last known token, then the guesses below it
    parents = (-1, *(0 if parent < 0 else parent + 1 for parent in TREE))
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    tree = Texts(decoder, [[*prompt, *guesses]])
    tree.step([Part(0, prompt_len - 1)])
    batch = PagedBatch(
        query_start_loc=(0, len(parents)),
        context_lens=(prompt_len - 1,),
        block_tables=(tree.tables[0],),
        parents=(parents,),
        block_size=BLOCK,
    )
    in_tree = tree.forward(
        [prompt[-1], *guesses], [prompt_len - 1 + depth for depth in depths], batch
    )
    for node in range(len(parents)):
        path, at = [], node
        while at > 0:
            path.append(guesses[at - 1])
            at = parents[at]
        chain = Texts(decoder, [prompt + path[::-1]])
        (in_chain,) = token_by_token(chain)
        assert torch.equal(in_tree[node], in_chain[-1]), node


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gemm_row_has_the_same_bits_in_every_call(dtype: torch.dtype, threads: int) -> None:
    for num_outputs, num_inputs in ((96, 32), (33, 60), (960, 576), (576, 1536)):
        weight = torch.randn(num_outputs, num_inputs).to(dtype)
        bias = torch.randn(num_outputs).to(dtype)
        matrix = GemmWeight(weight)
        linear = RowInvariantLinear([matrix])
        x = torch.randn(700, num_inputs).to(dtype)
        whole = linear(x, matrix, bias)
        assert whole.shape == (700, num_outputs)
        exact = F.linear(x.double(), weight.double(), bias.double())
        torch.testing.assert_close(whole.double(), exact, rtol=2e-2, atol=2e-2 * num_inputs**0.5)
        for count in (*range(1, 36), 100, 511, 513, 600):
            start = 700 - count
            assert torch.equal(linear(x[start:], matrix, bias), whole[start:]), count


def test_call_sizes_hold_the_base_and_are_covered_with_little_padding() -> None:
    linear = RowInvariantLinear([GemmWeight(torch.randn(960, 576))])
    assert BASE_ROWS in linear.call_sizes
    for num_rows in range(1, 1200):
        padded = linear.padded(num_rows)
        assert padded >= num_rows
        assert linear.padded(padded) == padded
    assert linear.padded(0) == 0


def test_a_single_call_size_serves_any_number_of_rows() -> None:
    """The fallback where no other size agrees."""
    plain = torch.randn(24, 40)
    weight = GemmWeight(plain)
    linear = RowInvariantLinear([weight], candidates=())
    assert linear.call_sizes == (BASE_ROWS,)
    x = torch.randn(75, 40)
    out = linear(x, weight)
    torch.testing.assert_close(out, x @ plain.T)
    for row in range(75):
        assert torch.equal(linear(x[row : row + 1], weight), out[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_measured_call_sizes_really_agree(dtype: torch.dtype) -> None:
    """On numbers that the measurement has not seen."""
    weights = [GemmWeight(torch.randn(shape).to(dtype)) for shape in ((96, 60), (576, 576))]
    sizes = measure_call_sizes(weights)
    generator = torch.Generator().manual_seed(99)
    for weight in weights:
        x = (5 * torch.randn(512, weight.shape[1], generator=generator)).to(dtype)
        base = torch.cat([weight.apply(part) for part in x.split(BASE_ROWS)])
        for size in sizes:
            rows = 512 // size * size
            out = torch.cat([weight.apply(part) for part in x[:rows].split(size)])
            assert torch.equal(out, base[:rows]), size


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [7, 32, 100, 576, 1536])
def test_elementwise_steps_and_norms_keep_a_rows_bits(
    width: int, dtype: torch.dtype, threads: int
) -> None:
    x = (3 * torch.randn(600, width)).to(dtype)
    weight = torch.randn(width).to(dtype)
    positions = torch.randint(0, 100_000, (600,))
    inv_freq = torch.rand(width)
    steps = {
        "silu": silu,
        "silu of a slice": lambda rows: silu(rows[:, : width // 2 + 1]),
        "rms_norm": lambda rows: F.rms_norm(rows, (width,), weight, 1e-5),
    }
    for name, step in steps.items():
        whole = step(x)
        for size in (1, 3, 16, 17, 40, 128, 333):
            parts = torch.cat([step(part) for part in x.split(size)])
            assert torch.equal(parts, whole), (name, size)
    whole = torch.cat(cos_sin(positions, inv_freq, 1.2, dtype), dim=1)
    for size in (1, 3, 17, 333):
        parts = torch.cat(
            [torch.cat(cos_sin(p, inv_freq, 1.2, dtype), dim=1) for p in positions.split(size)]
        )
        assert torch.equal(parts, whole), size


def test_silu_is_silu() -> None:
    x = torch.linspace(-200, 200, 4001, dtype=torch.float64)
    torch.testing.assert_close(silu(x), F.silu(x), rtol=1e-14, atol=1e-80)
    assert silu(torch.tensor([-500.0, 500.0])).tolist() == [0.0, 500.0]
