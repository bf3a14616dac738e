"""Checks the kernels, and then whole steps of the engine's target, on a GPU; no network:

    python -m specserve.gpu.check [--json FILE] [--seconds N] [--parts correct,speed,step]

It is `python -m specserve_kernels.gpu_check`, which cannot know the engine, with exact replay:
texts of a model of random weights, computed alone and sampled by the host, must come again to the
token from the device's own sampling, in batches, with chains and trees of guesses that are right or
wrong, with prompts whole or in chunks. Steps recur, so on a device most are replayed graphs.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from typing import Final

import torch
from torch import Tensor

from specserve.drafting import NO_DRAFT, Draft, chain
from specserve.gpu.check_chains import check_chains
from specserve.gpu.decoder import TritonDecoder
from specserve.gpu.target import DeviceTarget
from specserve.models.config import ModelConfig
from specserve.packing import pack
from specserve.target import HostTarget, Target
from specserve.types import Request, RowPlan, SamplingParams
from specserve_kernels.gpu_check.__main__ import main
from specserve_kernels.gpu_check.correctness import Sizes
from specserve_kernels.gpu_check.report import Correct

COMMAND: Final = "python -m specserve.gpu.check"
_BLOCK: Final = 16
_MOST_GUESSES: Final = 4
# (position of the next token, the text to come) -> guesses
Guess = Callable[[int, Seq[int]], Draft]


def check_engine(sizes: Sizes, device: torch.device) -> Iterator[Correct]:
    """Tokens that differ from those of the same prompts alone, of all settings."""
    num_texts, num_tokens = min(8, sizes.num_rows), min(32, sizes.context // 8)
    decoder = _random_decoder(sizes, device)
    requests = _requests(decoder, num_texts, sizes.context // 4)
    longest = max(len(request.prompt_ids) for request in requests) + num_tokens + _MOST_GUESSES + 1
    num_blocks = -(-longest // _BLOCK)
    room = {"num_blocks": num_texts * num_blocks, "block_size": _BLOCK}
    host = HostTarget(decoder, vocab_size=decoder.vocab_size, **room)
    truth = [_texts(host, [request], num_tokens, num_blocks)[0] for request in requests]
    target = DeviceTarget(
        decoder,
        **room,
        vocab_size=decoder.vocab_size,
        max_sequences=num_texts,
        max_guesses=_MOST_GUESSES,
        max_model_len=num_blocks * _BLOCK,
    )
    settings: dict[str, tuple[Guess, int]] = {
        "no guesses": (lambda position, rest: NO_DRAFT, 10**6),
        "chains": (_a_chain, 10**6),
        "trees, prompts in chunks": (_a_tree, 5),
    }
    for name, (guess, chunk) in settings.items():
        found = _texts(target, requests, num_tokens, num_blocks, guess, truth, chunk)
        wrong = sum(
            a != b
            for have, want in zip(found, truth, strict=True)
            for a, b in zip(have, want, strict=True)
        )
        yield Correct("engine", f"replay, {name}", num_texts, wrong, 0)
    yield from check_chains(decoder, requests, _MOST_GUESSES)


def _a_chain(position: int, rest: Seq[int]) -> Draft:
    """Right but for the third guess of every other step."""
    guesses = list(rest[:3])
    if position % 2 and len(guesses) == 3:
        guesses[2] += 1
    return chain(guesses)


def _a_tree(position: int, rest: Seq[int]) -> Draft:
    """Each right guess behind a wrong sibling, so that what is accepted has gaps."""
    if len(rest) < 2:
        return NO_DRAFT
    guesses = rest[0] + 1, rest[0], rest[1] + 1, rest[1]
    return Draft(token_ids=guesses, parents=(-1, -1, 1, 1))


def _texts(
    target: Target,
    requests: Seq[Request],
    num_tokens: int,
    num_blocks: int,
    guess: Guess = lambda position, rest: NO_DRAFT,
    truth: Seq[Seq[int]] = (),
    chunk: int = 10**6,
) -> list[list[int]]:
    """The first num_tokens tokens of each request, all decoded together.

    num_blocks: of each one's table; truth: what `guess` is told is to come; chunk: of prompts
    """
    histories = [list(request.prompt_ids) for request in requests]
    computed = [0] * len(requests)

    def outputs(idx: int) -> list[int]:
        return histories[idx][len(requests[idx].prompt_ids) :]

    while going := [idx for idx in range(len(requests)) if len(outputs(idx)) < num_tokens]:
        rows, drafts = [], []
        for idx in going:
            left = len(histories[idx]) - computed[idx]
            samples = left <= chunk
            told = truth[idx][len(outputs(idx)) :] if truth and left == 1 else ()
            drafts.append(guess(len(histories[idx]), told))
            rows.append(
                RowPlan(
                    seq_id=idx,
                    request=requests[idx],
                    history=histories[idx],
                    start=computed[idx],
                    num_tokens=min(left, chunk),
                    max_draft_tokens=_MOST_GUESSES,
                    samples=samples,
                    is_prefill=left > 1,
                    block_table=tuple(range(idx * num_blocks, (idx + 1) * num_blocks)),
                )
            )
        packed = pack(rows, drafts, target.block_size, vocab_size=target.vocab_size)
        with torch.inference_mode():
            ran = target.run(rows, drafts, packed, (), lambda: None)
        for row, judged in zip(rows, ran.judged, strict=True):
            computed[row.seq_id] += row.num_tokens
            if judged.verdict is not None:
                computed[row.seq_id] += len(judged.verdict.path)
                histories[row.seq_id] += judged.verdict.token_ids
    return [outputs(idx)[:num_tokens] for idx in range(len(requests))]


def _requests(decoder: TritonDecoder, num_texts: int, longest: int) -> list[Request]:
    """Prompts of any length and sampling of every kind that the device does alone."""
    rng = random.Random(0)
    kinds = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=50),
        SamplingParams(temperature=0.8, presence_penalty=0.7, logit_bias={3: 2.0}),
    )
    return [
        Request(
            request_id=f"{idx}",
            prompt_ids=tuple(
                rng.randrange(decoder.vocab_size) for _ in range(rng.randint(1, longest))
            ),
            params=kinds[idx % len(kinds)],
            seed=idx,
            drafter="none",
            max_draft_tokens=_MOST_GUESSES,
            verify="replay",
        )
        for idx in range(num_texts)
    ]


def _random_decoder(sizes: Sizes, device: torch.device) -> TritonDecoder:
    """Two layers in bf16 on a device, in fp32 in the interpreter, whose logits spread well."""
    num_heads, num_kv_heads, head_dim = sizes.heads
    width = min(sizes.hidden_size, 1024)
    config = ModelConfig(
        family="llama",
        vocab_size=min(sizes.vocab_size, 32000),
        hidden_size=width,
        intermediate_size=2 * width,
        num_layers=2,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        sliding_windows=(None, None),
    )
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return TritonDecoder(config, _random_weights(config), dtype=dtype, device=device)


def _random_weights(config: ModelConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int, scale: float = 1.5) -> Tensor:
        values = torch.randn(rows, columns, generator=generator)
        return values.mul_(scale / columns**0.5)

    width, inner = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, width, 3.0),
        "model.norm.weight": torch.ones(width),
    }
    for idx in range(config.num_layers):
        prefix = f"model.layers.{idx}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(width),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(width),
            f"{prefix}.self_attn.q_proj.weight": matrix(query, width),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv, width),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv, width),
            f"{prefix}.self_attn.o_proj.weight": matrix(width, query),
            f"{prefix}.mlp.gate_proj.weight": matrix(inner, width),
            f"{prefix}.mlp.up_proj.weight": matrix(inner, width),
            f"{prefix}.mlp.down_proj.weight": matrix(width, inner),
        }
    return weights


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], more={"engine": check_engine}, command=COMMAND))
