"""What an EAGLE-3 head costs behind a step of its target, natively and in torch, by turns.

    python -m tests.eagle3_cost --head PATH [--model demo] [--rows 1,4,16] [--k 1,3,5]

Every round is a step as the server takes it: the target's forward over all rows, observe, propose;
so the head finds the caches as the target has left them. Tokens are random, states the target's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence as Seq
from typing import Any

import msgspec
import torch
from torch import Tensor

from specserve.drafting import DraftRow, Outcome
from specserve.loading import LoadedModel, load_model, use_threads
from specserve.models.interface import Capture
from specserve.models.native import NativeDecoder
from specserve_drafts import DRAFTERS, DrafterResources
from specserve_drafts.eagle3 import Eagle3Drafter
from specserve_drafts.head_files import NativeForm
from specserve_kernels.interface import PagedBatch
from tests.logit_rows import a_sampling_request

BLOCK, CONTEXT = 16, 200


class Rows:
    """R sequences, their KV and the heads that guess for them."""

    def __init__(self, target: LoadedModel, drafters: dict[str, Eagle3Drafter], num_rows: int):
        assert isinstance(target.decoder, NativeDecoder)
        self.model = target.decoder
        self.drafters = drafters
        blocks = 64
        self.kv = self.model.new_kv_cache(num_rows * blocks, BLOCK)
        self.tables = [tuple(range(r * blocks, (r + 1) * blocks)) for r in range(num_rows)]
        self.generator = torch.Generator().manual_seed(0)
        self.histories = [self.tokens(CONTEXT) for _ in range(num_rows)]
        self.computed = [0] * num_rows
        self.layers = next(iter(drafters.values())).hidden_layers

    def tokens(self, count: int) -> list[int]:
        return torch.randint(0, 49000, (count,), generator=self.generator).tolist()

    def forward(self) -> tuple[float, list[Outcome]]:
        """Computes all known tokens of all rows, then each has one more. Seconds, outcomes."""
        starts, ids, positions = [0], list[int](), list[int]()
        for history, computed in zip(self.histories, self.computed, strict=True):
            ids += history[computed:]
            positions += range(computed, len(history))
            starts.append(len(ids))
        batch = PagedBatch(
            query_start_loc=tuple(starts),
            context_lens=tuple(self.computed),
            block_tables=tuple(self.tables),
            parents=(None,) * len(self.tables),
            block_size=BLOCK,
        )
        states = torch.empty(len(ids), len(self.layers), self.model.config.hidden_size)
        began = time.perf_counter()
        self.model.forward(
            torch.tensor(ids),
            torch.tensor(positions),
            batch,
            self.kv,
            [end - 1 for end in starts[1:]],
            capture=Capture(self.layers, states),
        )
        seconds = time.perf_counter() - began
        return seconds, self._outcomes(starts, states)

    def _outcomes(self, starts: Seq[int], states: Tensor) -> list[Outcome]:
        outcomes = []
        for idx, history in enumerate(self.histories):
            count = starts[idx + 1] - starts[idx]
            history += self.tokens(1)
            outcomes.append(
                Outcome(
                    seq_id=idx,
                    request=a_sampling_request(()),
                    start=self.computed[idx],
                    token_ids=tuple(history[self.computed[idx] :]),
                    num_computed=count,
                    drafter="none",
                    num_drafted=0,
                    num_accepted=0,
                    hidden=states[starts[idx] : starts[idx + 1]],
                )
            )
            self.computed[idx] += count
        return outcomes

    def draft_rows(self, num_guesses: int, asked: dict[str, Any]) -> list[DraftRow]:
        return [
            DraftRow(
                seq_id=idx,
                request=a_sampling_request(history[:CONTEXT], **asked),
                history=history,
                num_known=len(history),
                max_tokens=num_guesses,
                kv_len=0,
                block_table=table,
            )
            for idx, (history, table) in enumerate(zip(self.histories, self.tables, strict=True))
        ]


def measure(rows: Rows, num_guesses: int, rounds: int, asked: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a plain step ("step") and, by head, of observe and propose."""
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for step in range(-2, rounds):
        for name in rows.drafters:
            seconds, outcomes = rows.forward()
            if step >= 0:
                note("step", seconds)
            draft_rows = rows.draft_rows(num_guesses, asked)
            # The others keep up in between: their own turn must not begin with old states.
            order = [name, *(other for other in rows.drafters if other != name)]
            for other in order:
                drafter = rows.drafters[other]
                began = time.perf_counter()
                drafter.observe(outcomes)
                observed = time.perf_counter()
                drafts = drafter.propose(
                    draft_rows
                    if other == name
                    else [msgspec.structs.replace(row, max_tokens=1) for row in draft_rows]
                )
                ended = time.perf_counter()
                if other == name and step >= 0:
                    assert all(len(one.token_ids) == num_guesses for one in drafts)
                    note(f"{name} observe", observed - began)
                    note(f"{name} propose", ended - observed)
    return {name: statistics.median(times) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--head", required=True)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", default="1,4,16")
    parser.add_argument("--k", default="1,3,5")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--computes", default="native,torch")
    options = parser.parse_args()
    use_threads(0)
    target = load_model(options.model, "int8", "auto", lambda line: None)
    forms = {"native": NativeForm("int8", torch.get_num_threads()), "torch": None}
    for num_rows in map(int, options.rows.split(",")):
        drafters = {}
        for compute in options.computes.split(","):
            began = time.perf_counter()
            drafter = DRAFTERS["eagle3"](
                DrafterResources(
                    argument=options.head,
                    vocab_size=target.vocab_size,
                    num_blocks=num_rows * 64,
                    block_size=BLOCK,
                    target=msgspec.structs.replace(target.parts, native=forms[compute]),
                )
            )
            assert isinstance(drafter, Eagle3Drafter)
            drafters[compute] = drafter
            print(f"{compute}: loaded in {time.perf_counter() - began:.2f} s")
        for num_guesses in map(int, options.k.split(",")):
            rows = Rows(target, drafters, num_rows)
            for drafter in drafters.values():
                for idx in range(num_rows):
                    drafter.forget(idx)
            asked = {"temperature": options.temperature}
            found = measure(rows, num_guesses, options.rounds, asked)
            parts = [f"{num_rows} rows, K = {num_guesses}: step {1e3 * found['step']:.1f} ms"]
            for name in drafters:
                propose = found[f"{name} propose"]
                parts.append(
                    f"{name}: observe {1e3 * found[f'{name} observe']:.2f}, propose "
                    f"{1e3 * propose:.2f}, per depth {1e3 * propose / num_guesses:.2f} "
                    f"({100 * propose / num_guesses / found['step']:.1f} % of a step)"
                )
            print("; ".join(parts), flush=True)


if __name__ == "__main__":
    main()
