"""Text to token ids and back, streamed or whole, with one rule for both.

Decoding works on bytes: each id has its bytes, and a stream gives out text as soon as a UTF-8
sequence is complete. `decode` is the stream run to its end, so streamed text and whole text agree
by construction. (`tokenizers.decoders.DecodeStream` was tried: it repeats the decoding of a window
for each token, and holds back complete characters that follow an invalid byte.)
An incomplete sequence at the end is dropped: it is a character the model did not finish.

All methods may be called from any thread; `encode` releases the GIL while it works.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol  # Any: JSON documents

import tokenizers

from specserve.errors import ModelError, RequestError
from specserve.files import read_json
from specserve.token_bytes import token_bytes_table

MAX_VOCAB_DIFFERENCE = 128  # added tokens that one of two otherwise equal vocabularies may lack
SPECIAL_TOKEN_NAMES = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip


class StreamDecoder(Protocol):
    """Text of one sequence, token by token."""

    def push(self, token_id: int) -> str:
        """The text that is now certain; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What is still owed when no token follows. Idempotent."""
        ...


class Tokenizer:
    """A Hugging Face fast tokenizer and what a server needs to know of it. Immutable."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_ids: Iterable[int],
        chat_template: str | None,
        source: str,
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may carry its training run's settings
        backend.no_padding()
        self._backend = backend
        self._bytes = token_bytes_table(backend)
        self._special = {
            token_id: token
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self.source = source  # for messages: where it was loaded from
        self.special_tokens = dict(special_tokens)  # by role: bos_token, eos_token, ...
        self.eos_ids = frozenset(eos_ids)
        self.chat_template = chat_template

    @classmethod
    def load(cls, directory: Path) -> Tokenizer:
        """From tokenizer.json; through transformers where there is none. Else ModelError."""
        config = read_json(directory / "tokenizer_config.json")
        config = {**read_json(directory / "special_tokens_map.json"), **config}
        special = {
            name: text
            for name in SPECIAL_TOKEN_NAMES
            if (text := _token_text(config.get(name))) is not None
        }
        backend = _load_backend(directory)
        return cls(
            backend,
            special_tokens=special,
            eos_ids=_eos_ids(directory, backend, special),
            chat_template=_chat_template(directory, config),
            source=str(directory),
        )

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. A model may have more rows (padding)."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens: those that `skip_special_tokens` leaves out."""
        return frozenset(self._special)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches the text of any control token, the longest first; never where there are none."""
        texts = sorted((token.content for token in self._special.values()), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, texts)) or "(?!)")

    @cached_property
    def bos_id(self) -> int | None:
        bos = self.special_tokens.get("bos_token")
        return None if bos is None else self._backend.token_to_id(bos)

    def token_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it."""
        found: int | None = self._backend.token_to_id(token)
        return found

    def vocab(self) -> dict[str, int]:
        return dict(self._backend.get_vocab(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelt out in it become control tokens.

        With add_special_tokens, what the model expects around a prompt (mostly BOS) is added,
        but never a second BOS before text that begins with one. RequestError for a lone surrogate.
        """
        ids = _encode(self._backend, text, add_special_tokens)
        if add_special_tokens and len(ids) > 1 and ids[0] == ids[1] == self.bos_id:
            return ids[1:]
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` with nothing added and special tokens in it read as ordinary text.

        RequestError in the odd vocabulary whose merges spell out a control token all the same.
        """
        ids = _encode(self._plain_backend, text, False)
        unk = self._backend.token_to_id(self.special_tokens.get("unk_token", ""))
        for token_id in ids:
            if token_id in self._special and token_id != unk:
                raise RequestError(
                    f"the text spells the control token {self._special[token_id].content!r}, which "
                    "this model's tokenizer cannot write as plain text: leave it out"
                )
        return ids

    def encode_pieces(self, pieces: Sequence[tuple[bool, str]]) -> list[int]:
        """Ids of consecutive pieces: (True, a control token's text) or (False, plain text).

        Equal to `encode` of the whole, without additions, where no plain piece spells a control
        token.
        """
        ids: list[int] = []
        by_text = {token.content: token for token in self._special.values()}
        for piece_idx, (is_control, text) in enumerate(pieces):
            if is_control:
                ids += self.encode(text, add_special_tokens=False)
                continue
            # Some control tokens (Phi-3's) swallow the white space beside them
            if piece_idx > 0 and by_text[pieces[piece_idx - 1][1]].rstrip:
                text = text.lstrip()
            if piece_idx + 1 < len(pieces) and by_text[pieces[piece_idx + 1][1]].lstrip:
                text = text.rstrip()
            ids += self.encode_inside(text) if piece_idx else self.encode_plain(text)
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, exactly as a stream of them would give it."""
        stream = self.stream_decoder(skip_special_tokens)
        return "".join([*map(stream.push, ids), stream.finish()])

    def stream_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder:
        skipped = self.special_ids if skip_special_tokens else frozenset()
        if self._bytes is None:
            return _WindowStream(self._backend, skipped)
        return _ByteStream(self._bytes.of, skipped, strip_space=self._bytes.strips_first_space)

    @property
    def strips_first_space(self) -> bool:
        """Whether a text's first space marks its start and is not shown."""
        return self._bytes is not None and self._bytes.strips_first_space

    @property
    def spells_bytes(self) -> bool:
        """Whether each token adds the same bytes to any text, the first space of one apart."""
        return self._bytes is not None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text; b"" for an id outside the vocabulary."""
        if self._bytes is not None:
            return self._bytes.of.get(token_id, b"")
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def token_text(self, token_id: int) -> str:
        """A token for display; one that is not whole UTF-8 is spelt `bytes:\\xf0\\x9f`."""
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def encode_inside(self, text: str) -> list[int]:
        """`encode_plain` of text that does not begin the prompt."""
        if not text or not self._marks_only_the_start:
            return self.encode_plain(text)
        # Behind a line break no start-of-text space is added; then the line break is cut off again
        newline, ids = self.encode_plain("\n"), self.encode_plain("\n" + text)
        return ids[len(newline) :] if ids[: len(newline)] == newline else self.encode_plain(text)

    @cached_property
    def _marks_only_the_start(self) -> bool:
        """Whether text after a control token is encoded otherwise than at the start of a prompt."""
        control = next((t.content for t in self._special.values() if not t.rstrip), None)
        if control is None:
            return False
        inside = self.encode(control + "a", add_special_tokens=False)[1:]
        return inside != self.encode("a", add_special_tokens=False)

    @cached_property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        # A copy: the switch is the Rust object's state, and `encode` may be running elsewhere
        plain = tokenizers.Tokenizer.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain


def check_same_vocabulary(target: Tokenizer, draft: Tokenizer) -> None:
    """Raise ModelError unless both give every id the same token.

    Only ids that both have are compared: one may have a few more added tokens, and rows that a
    model pads its embedding with have no token at all.
    """
    target_tokens = {token_id: token for token, token_id in target.vocab().items()}
    draft_tokens = {token_id: token for token, token_id in draft.vocab().items()}
    for token_id in sorted(target_tokens.keys() & draft_tokens.keys()):
        if target_tokens[token_id] != draft_tokens[token_id]:
            raise ModelError(
                f"the draft model's vocabulary differs: id {token_id} is "
                f"{target_tokens[token_id]!r} in the target ({target.source}) and "
                f"{draft_tokens[token_id]!r} in the draft ({draft.source}): choose a draft model "
                "of the same family"
            )
    if abs(target.vocab_size - draft.vocab_size) > MAX_VOCAB_DIFFERENCE:
        raise ModelError(
            f"the draft model's vocabulary has {draft.vocab_size} tokens and the target's "
            f"{target.vocab_size}; they may differ by {MAX_VOCAB_DIFFERENCE} at most: choose a "
            "draft model of the same family"
        )


class _ByteStream:
    """The usual case: every token is a fixed string of bytes."""

    def __init__(
        self, token_bytes: Mapping[int, bytes], skipped: frozenset[int], *, strip_space: bool
    ) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        raw = self._token_bytes.get(token_id, b"")
        if self._strip_space and raw:
            # Sentencepiece marks the start of the text with a space that is not part of it
            raw = raw.removeprefix(b" ")
            self._strip_space = False
        return self._utf8.decode(raw)

    def finish(self) -> str:
        self._utf8.reset()  # drops an incomplete tail
        return ""


class _WindowStream:
    """Decoders that rewrite text across tokens (WordPiece): the last few tokens are re-decoded."""

    CONTEXT = 4  # tokens kept: enough for every decoder that joins words
    LONGEST_WAIT = 16  # tokens without a complete character after which it is no character

    def __init__(self, backend: tokenizers.Tokenizer, skipped: frozenset[int]) -> None:
        self._backend = backend
        self._skipped = skipped
        self._window: list[int] = []
        self._given = ""  # the text of the window already given out

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text: str = self._backend.decode(self._window, skip_special_tokens=False)
        if text.endswith("�") and len(self._window) < self.LONGEST_WAIT:
            return ""
        new = text[len(self._given) :]
        self._window = self._window[-self.CONTEXT :]
        self._given = self._backend.decode(self._window, skip_special_tokens=False)
        return new

    def finish(self) -> str:
        return ""


def _encode(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate (U+{ord(text[error.start]):04X} at character "
                f"{error.start}), which is not valid Unicode: send well-formed UTF-8",
                param="prompt",
            ) from error
    # The batch call, because the single one holds the GIL: 2 MB of text stopped every other
    # thread for 3.5 s, this way for 0.1 s
    encoding = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    return list(encoding.ids)


def _load_backend(directory: Path) -> tokenizers.Tokenizer:
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the Rust library raises bare Exception
            raise ModelError(f"{path} cannot be read: {error}") from error
    # Imported here: it costs two seconds, and only old checkpoints need it
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # whatever a converter meets in the files
        raise ModelError(f"{directory} has no tokenizer that can be read: {error}") from error
    backend = getattr(slow, "backend_tokenizer", None)  # absent where transformers has no fast one
    if not isinstance(backend, tokenizers.Tokenizer):
        raise ModelError(f"{directory}: {type(slow).__name__} has no fast version, which is needed")
    return tokenizers.Tokenizer.from_str(backend.to_str())


def _token_text(value: Any) -> str | None:
    """tokenizer_config.json spells a token as text or as {"content": text}."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _eos_ids(
    directory: Path, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]
) -> set[int]:
    """All ids that end a sequence, from every file that may name one."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        document = read_json(directory / name)
        for part in (document, document.get("text_config") or {}):
            value = part.get("eos_token_id")
            values = value if isinstance(value, list) else [value]
            ids |= {item for item in values if type(item) is int and item >= 0}
    if eos := special_tokens.get("eos_token"):
        token_id = backend.token_to_id(eos)
        ids |= set() if token_id is None else {token_id}
    return ids


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if template is None:
        template = read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(template, list):  # several by name; `default` is the one for chatting
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None
