"""A tokenizer with tokens of several characters, and what texts are asked to look like."""

from __future__ import annotations

import functools
import json

import tokenizers
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from specserve.constraint import Constraint, GrammarSpec
from specserve.grammar import Grammars
from specserve.tokenizer import Tokenizer

VOCAB_SIZE = 384
END = 0

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "kind": {"enum": ["tree", "treehouse", "shrub"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
SPECS = {
    "schema": GrammarSpec(kind="json_schema", text=json.dumps(SCHEMA), param="json"),
    "compact": GrammarSpec(kind="json_schema", text=json.dumps(SCHEMA), param="json", compact=True),
    "regex": GrammarSpec(kind="regex", text=r"(yes|no|not yet)( [a-e]{1,4}){2,5}\.", param="regex"),
    "choice": GrammarSpec(
        kind="choice", text=json.dumps(["the tree", "the treehouse", "a shrub"]), param="choice"
    ),
    "grammar": GrammarSpec(
        kind="grammar", text='root ::= ("a" | "bc" root) "d"\n', param="grammar"
    ),
}


@functools.cache
def bpe_tokenizer(chat_template: str | None = None) -> Tokenizer:
    """Id 0 is EOS and 1 a control token; the rest bytes, and merges that JSON is made of."""
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|end|>", "<|user|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(), trainer)
    assert backend.get_vocab_size() == VOCAB_SIZE
    backend.add_special_tokens([AddedToken("<|end|>", special=True)])
    return Tokenizer(
        backend,
        special_tokens={"eos_token": "<|end|>"},
        eos_ids=[END],
        chat_template=chat_template,
        source="the tests",
    )


def _corpus() -> list[str]:
    kinds = ["tree", "treehouse", "shrub"]
    texts = [
        json.dumps({"name": f"n{i}x", "age": i, "kind": kinds[i % 3]}, indent=i % 2 or None)
        for i in range(80)
    ]
    return [*texts, "the treehouse is not yet a shrub. yes, no, abc bcd cde. " * 40]


@functools.cache
def grammars() -> Grammars:
    return Grammars(bpe_tokenizer())


def constraint(name: str) -> Constraint:
    return grammars().constraint(SPECS[name])
