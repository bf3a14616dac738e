"""`specserve bench perplexity`: what a dtype costs in quality, measured on a text.

The text is cut into windows of tokens that do not overlap; every token but a window's first is
predicted from those before it in the window. All dtypes see the same windows, so that the ratio of
two perplexities has a far smaller error than either: it comes from the paired differences.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from specserve.errors import ConfigError
from specserve.loading import LoadedModel, check_backend, choose_dtype, load_model, use_threads
from specserve.models.interface import CausalLM
from specserve_kernels.interface import PagedBatch

BASELINE = "bf16"
_CHUNK = 128  # rows of logits held at once: 25 MB at V = 49,152
_BLOCK = 16


class Perplexity(msgspec.Struct, frozen=True, kw_only=True):
    """Of one dtype over one text. Logarithms are natural."""

    dtype: str
    num_tokens: int  # predicted ones
    mean_nll: float  # nats per token
    perplexity: float
    ratio: float  # to the baseline's perplexity
    ratio_error: float  # one standard error of `ratio`, from paired differences
    same_argmax: float  # share of places where the likeliest token is the baseline's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `specserve bench perplexity`."""
    parser.add_argument("--text", nargs="+", required=True, help="UTF-8 files, read in this order")
    parser.add_argument("--model", default="demo", help="as for serve (default: demo)")
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=["bf16", "int8"],
        help="dtypes to compare (default: bf16 int8); bf16, the baseline, always runs",
    )
    parser.add_argument("--backend", default="auto", help="as for serve (default: auto)")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--window", type=int, default=512, help="tokens per window")
    parser.add_argument("--max-tokens", type=int, default=None, help="read no more of the text")
    parser.add_argument("--json", default=None, metavar="FILE", help="write the numbers there, too")


def run(options: argparse.Namespace) -> int:
    """Measure and print; ConfigError says what to change."""
    if options.window < 2:
        raise ConfigError(f"--window is {options.window}, it must be at least 2")
    try:
        text = "\n\n".join(Path(name).read_text(encoding="utf-8") for name in options.text)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text cannot be read: {error}") from error
    check_backend(options.backend)
    use_threads(options.threads)
    found: list[Perplexity] = []
    baseline: Scores | None = None
    chosen = [choose_dtype(dtype, options.backend) for dtype in options.dtype]
    for dtype in dict.fromkeys([BASELINE, *chosen]):
        loaded = load_model(options.model, dtype, options.backend, _say)
        ids = loaded.tokenizer.encode(text)[: options.max_tokens]
        if len(ids) < 2:
            raise ConfigError("--text has fewer than 2 tokens: give a longer one")
        scores = _score(loaded, ids, options.window, _progress(dtype))
        baseline = baseline or scores
        found.append(summarise(dtype, scores, baseline))
        print(_line(found[-1]), flush=True)
    if options.json is not None:
        Path(options.json).write_text(
            json.dumps([msgspec.structs.asdict(one) for one in found], indent=2) + "\n",
            encoding="utf-8",
        )
    return 0


class Scores(msgspec.Struct, frozen=True):
    """nll [n] fp64: minus the log-probability of each predicted token; argmax [n] int64."""

    nll: Tensor
    argmax: Tensor


def score(
    model: CausalLM, ids: Seq[int], window: int, progress: Callable[[float], None] = lambda _: None
) -> Scores:
    """Every window of ids through the model, in chunks of at most `_CHUNK` rows."""
    num_blocks = -(-window // _BLOCK)
    cache = model.new_kv_cache(num_blocks, _BLOCK)
    nll, argmax = [], []
    for start, first, last in _chunks(len(ids), window):
        batch = PagedBatch(
            query_start_loc=(0, last - first),
            context_lens=(first - start,),
            block_tables=(tuple(range(num_blocks)),),
            parents=(None,),
            block_size=_BLOCK,
        )
        # The last token of a window is computed for nothing; its successor is in the next window.
        targets = torch.tensor(ids[first + 1 : min(last + 1, start + window, len(ids))])
        with torch.inference_mode():
            logits = model.forward(
                torch.tensor(ids[first:last]),
                torch.arange(first - start, last - start),
                batch,
                cache,
                range(len(targets)),
            )
            chosen = logits.gather(1, targets[:, None])[:, 0].double()
            nll.append(logits.double().logsumexp(1) - chosen)
            argmax.append(logits.argmax(1))
        progress(last / len(ids))
    return Scores(torch.cat(nll), torch.cat(argmax))


def summarise(dtype: str, scores: Scores, baseline: Scores) -> Perplexity:
    num_tokens = len(scores.nll)
    mean = float(scores.nll.mean())
    difference = scores.nll - baseline.nll  # [n] paired
    ratio = math.exp(float(difference.mean()))
    spread = float(difference.std()) if num_tokens > 1 else math.inf
    return Perplexity(
        dtype=dtype,
        num_tokens=num_tokens,
        mean_nll=mean,
        perplexity=math.exp(mean),
        ratio=ratio,
        ratio_error=ratio * spread / math.sqrt(num_tokens),
        same_argmax=float((scores.argmax == baseline.argmax).double().mean()),
    )


# ---- inside ------------------------------------------------------------------------------


def _chunks(num_ids: int, window: int) -> Iterator[tuple[int, int, int]]:
    """(window start, first token, token after the last) of each forward that predicts anything."""
    for start in range(0, num_ids - 1, window):
        end = min(start + window, num_ids)
        for first in range(start, end - 1, _CHUNK):
            yield start, first, min(first + _CHUNK, end)


def _score(
    loaded: LoadedModel, ids: Seq[int], window: int, progress: Callable[[float], None]
) -> Scores:
    longest = loaded.decoder.max_position_embeddings
    if window > longest:
        raise ConfigError(f"--window is {window}, the model's limit is {longest}")
    return score(loaded.decoder, ids, window, progress)


def _line(one: Perplexity) -> str:
    return (
        f"{one.dtype:5} {one.num_tokens:,} tokens  mean NLL {one.mean_nll:.4f}  "
        f"perplexity {one.perplexity:.3f}  ratio to {BASELINE} {one.ratio:.4f} "
        f"± {one.ratio_error:.4f}  same argmax {one.same_argmax:.1%}"
    )


def _progress(dtype: str) -> Callable[[float], None]:
    shown = -1

    def progress(share: float) -> None:
        nonlocal shown
        if int(share * 10) > shown:
            shown = int(share * 10)
            _say(f"{dtype}: {share:.0%}")

    return progress


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
