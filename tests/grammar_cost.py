"""What a grammar costs, in microseconds on this machine: `python -m tests.grammar_cost`.

The demo model's tokenizer (49,152 ids) and a middling JSON schema; one text of it, read token by
token as a server without guesses would.
"""

from __future__ import annotations

import json
import time
from statistics import median

import numpy as np

from specserve.constraint import GrammarSpec
from specserve.demo import pull_demo
from specserve.grammar import Grammars
from specserve.sampler.rows import LogitsRow, allowed
from specserve.tokenizer import Tokenizer
from specserve.types import Request, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["DE", "FR", "US", "GB"]},
            },
            "required": ["street", "zip", "country"],
        },
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "address", "active"],
}
TEXT = json.dumps(
    {
        "name": "Ada Lovelace of Marylebone",
        "age": 36,
        "email": "ada@example.org",
        "tags": ["red", "blue"],
        "address": {"street": "12 St James's Square", "zip": "10115", "country": "GB"},
        "active": True,
    }
)


def main() -> None:
    tokenizer = Tokenizer.load(pull_demo())
    grammars = Grammars(tokenizer)
    spec = GrammarSpec(kind="json_schema", text=json.dumps(SCHEMA), param="json")
    taken: dict[str, list[float]] = {}

    def timed(name: str, since: float) -> None:
        taken.setdefault(name, []).append(1e6 * (time.perf_counter() - since))

    begun = time.perf_counter()
    grammars.constraint(spec)
    timed("the first grammar of a server", begun)
    output = tokenizer.encode_plain(TEXT)
    logits = np.random.default_rng(0).standard_normal(tokenizer.vocab_size, dtype=np.float32)
    for _ in range(20):
        begun = time.perf_counter()
        constraint = grammars.constraint(spec)
        timed("a further grammar", begun)
        for at in range(len(output)):
            known = output[:at]
            begun = time.perf_counter()
            constraint.mask(known, 0, ())
            timed("read a token, make its mask", begun)
            row = LogitsRow(_request(constraint), known)
            begun = time.perf_counter()
            allowed(logits, row)
            timed("apply a mask that is made", begun)
            begun = time.perf_counter()
            constraint.admits(known, 0, output[at : at + 5])
            timed("look at 5 guesses", begun)
            begun = time.perf_counter()
            constraint.forced(known, 0, 8)
            timed("find what is forced", begun)
    for name, values in taken.items():
        p99 = sorted(values)[int(0.99 * (len(values) - 1))]
        print(f"{name:30} median {median(values):9,.0f} us   p99 {p99:9,.0f}   n {len(values)}")


def _request(constraint: object) -> Request:
    return Request(
        request_id="r",
        prompt_ids=(),
        params=SamplingParams(),
        seed=0,
        drafter="none",
        max_draft_tokens=0,
        verify="replay",
        constraint=constraint,  # type: ignore[arg-type]  # a Grammars makes no others
    )


if __name__ == "__main__":
    main()
