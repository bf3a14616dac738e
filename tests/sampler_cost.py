"""What choosing tokens costs, in numpy and in compiled code: `python -m tests.sampler_cost`.

The rows are the demo model's on a text, where its files are here.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specserve.demo import demo_dir
from specserve.noise import Noise
from specserve.sampler import LogitsRow, choose_row, choose_row_in_numpy, edited
from specserve_kernels import native_sampler
from tests.logit_rows import a_sampling_request, random_logits


def real_logits() -> torch.Tensor | None:
    """[16, V] of the demo model on a text, if its files are here."""
    if not (demo_dir() / "config.json").exists():
        return None
    model = AutoModelForCausalLM.from_pretrained(demo_dir(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_dir())
    text = (
        "The history of the lighthouse goes back to times when fires were lit on hilltops. Later, "
        "towers were built to guide mariners into ports, and their keepers wrote careful logs of "
        "storms, ships and repairs. In the spring of 1887, "
    )
    with torch.inference_mode():
        return model(tokenizer(text, return_tensors="pt").input_ids).logits[0, -16:].contiguous()


COSTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T = 1": {},
    "T = 0.7": {"temperature": 0.7},
    "T = 1, top-p 0.95": {"top_p": 0.95},
    "T = 0.7, top-p 0.95": {"temperature": 0.7, "top_p": 0.95},
    "T = 1, top-k 40": {"top_k": 40},
    "T = 1, penalties": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
}


def main() -> None:
    """Milliseconds for 1 and for 16 rows: least of 40 runs, numpy and native in turn."""
    logits, noise = real_logits(), Noise()
    if logits is None:
        print("no demo model here: logits of spread 5")
        logits = random_logits(16, 49_152, spread=5.0)
    plain = logits.numpy()

    def in_numpy(row: LogitsRow, values: Any) -> None:
        choose_row_in_numpy(edited(values, row), row, noise=noise)

    def fast(row: LogitsRow, values: Any) -> None:
        choose_row(values, row, noise=noise)

    print(f"native: {native_sampler.available() and native_sampler.instruction_set()}")
    for name, options in COSTS.items():
        history = tuple(i % 200 for i in range(300))
        rows = [LogitsRow(a_sampling_request(seed=s, **options), history) for s in range(16)]
        least: dict[tuple[str, int], float] = {}
        for _, num_rows, way in itertools.product(range(40), (1, 16), (in_numpy, fast)):
            for _ in range(2):  # the second time finds the caches as it left them
                start = time.thread_time()
                for row, values in zip(rows[:num_rows], plain, strict=False):
                    way(row, values)
            key = way.__name__, num_rows
            least[key] = min(least.get(key, math.inf), time.thread_time() - start)
        figures = [
            f"{num_rows:2} rows {least['in_numpy', num_rows] * 1e3:6.3f} -> "
            f"{least['fast', num_rows] * 1e3:.3f}"
            for num_rows in (1, 16)
        ]
        print(f"{name:20} {'   '.join(figures)}")


if __name__ == "__main__":
    main()
