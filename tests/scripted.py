"""A language model whose reply is written down, over a real tokenizer with one token per byte.

The model keeps token ids in its KV cache and reads its whole context back from there through the
block tables, so a wrong slot, a rejected guess left behind or a block freed too early changes its
text. What it says next is a function of everything before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq

import tokenizers
import torch
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import Tensor

from specserve.drafting import Draft, DraftRow, Outcome, chain
from specserve.kv_cache import KVCache
from specserve.tokenizer import Tokenizer
from specserve_kernels.interface import PagedBatch

SPECIAL = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>", "<|broken|>")
BOS, END, USER, ASSISTANT, BROKEN = range(256, 256 + len(SPECIAL))
VOCAB_SIZE = 256 + len(SPECIAL)
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}<|user|>{% endif %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{% endif %}"
    "{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

# As models that call functions have it: what was said of functions is told, a result has a turn.
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<tools>{{ tool | tojson }}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{% else %}<|user|>{{ message.role }}>"
    "{% endif %}{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

Script = Callable[[Seq[int]], int]  # all tokens so far -> the next one


@functools.cache
def byte_tokenizer(template: str = TEMPLATE, *more_special: str) -> Tokenizer:
    """Id b is byte b for b < 256, so every character of more than one byte is split."""
    alphabet = _byte_level_alphabet()
    vocab = {char: byte for byte, char in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True) for token in (*SPECIAL, *more_special)]
    )
    return Tokenizer(
        backend,
        special_tokens={"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]},
        eos_ids=[END],
        chat_template=template,
        source="the scripted model",
    )


def _byte_level_alphabet() -> list[str]:
    """The printable character by which byte-level vocabularies write each byte."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(hidden)) for byte in range(256)]


def says(text: str | bytes, *, then: int | None = END) -> Script:
    """Every prompt is answered with `text` and then the token `then`; None: with `text` for ever.

    The reply begins after ASSISTANT (chat), or else after the prompt's first ":".
    """
    reply = list(text.encode() if isinstance(text, str) else text)

    def next_token(history: Seq[int]) -> int:
        num_said = len(history) - reply_start(history)
        if then is None or num_said < len(reply):
            return reply[num_said % len(reply)]
        return then

    return next_token


def reply_start(history: Seq[int]) -> int:
    known = list(history)
    for marker in (ASSISTANT, ord(":")):
        if marker in known:
            return known.index(marker) + 1
    return 1


def by_first_letter(scripts: dict[str, Script]) -> Script:
    """Prompts that begin differently are answered differently."""
    by_token = {ord(letter): script for letter, script in scripts.items()}
    return lambda history: by_token[history[0]](history)


class ScriptedModel:
    """CausalLM. on_forward runs on the worker thread before each forward: it may wait or raise."""

    vocab_size = VOCAB_SIZE
    dtype = torch.float64

    def __init__(self, script: Script, on_forward: Callable[[], None] = lambda: None) -> None:
        self._script = script
        self._on_forward = on_forward

    def new_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return KVCache(
            layers=1,
            num_blocks=num_blocks,
            block_size=block_size,
            kv_heads=1,
            head_dim=1,
            dtype=self.dtype,
        )

    def kv_bytes_per_token(self) -> int:
        return 2 * self.dtype.itemsize

    def forward(
        self,
        input_ids: Tensor,  # [T]
        positions: Tensor,  # [T]
        batch: PagedBatch,
        kv_cache: KVCache,
        logits_indices: Seq[int],
    ) -> Tensor:  # [L, V]
        self._on_forward()
        keys = kv_cache.keys.view(-1)  # [P * S], token ids
        histories: list[list[int]] = []  # per packed token: all it may see, itself last
        for b, table in enumerate(batch.block_tables):
            start, end = batch.query_start_loc[b], batch.query_start_loc[b + 1]
            context_len = batch.context_lens[b]
            slots = [
                table[at // batch.block_size] * batch.block_size + at % batch.block_size
                for at in range(context_len + end - start)
            ]
            keys[slots[context_len:]] = input_ids[start:end].to(keys.dtype)
            segment = [int(key) for key in keys[slots].tolist()]
            histories += [segment[: context_len + 1 + j] for j in range(end - start)]
        logits = torch.empty(len(logits_indices), VOCAB_SIZE, dtype=self.dtype)
        for row, at in enumerate(logits_indices):
            logits[row] = self._logits(histories[at])
        return logits

    def _logits(self, history: list[int]) -> Tensor:  # [V]
        """The scripted token is the likeliest by far, the others follow in the order of ids."""
        token_id = self._script(history)
        if token_id == BROKEN:
            return torch.full((VOCAB_SIZE,), torch.nan, dtype=self.dtype)
        distance = (torch.arange(VOCAB_SIZE) - token_id) % VOCAB_SIZE
        return torch.where(distance == 0, 20.0, -0.01 * distance).to(self.dtype)


class Guesser:
    """Guesses what the script says; `right(i)` tells whether the i-th guess of a step is right."""

    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, name: str, script: Script, right: Callable[[int], bool]) -> None:
        self.name = name
        self._script = script
        self._right = right

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        return [self._guess(row) for row in rows]

    def _guess(self, row: DraftRow) -> Draft:
        known = list(row.history)
        for at in range(row.max_tokens):
            token_id = self._script(known)
            known.append(token_id if self._right(at) else (token_id + 1) % 256)
        return chain(known[len(row.history) :])

    def observe(self, outcomes: Seq[Outcome]) -> None:
        return

    def forget(self, seq_id: int) -> None:
        return


def guessers(script: Script) -> dict[str, Guesser]:
    """oracle: always right; anti: never; part: the first two of a step are."""
    return {
        "oracle": Guesser("oracle", script, lambda at: True),
        "anti": Guesser("anti", script, lambda at: False),
        "part": Guesser("part", script, lambda at: at < 2),
    }
