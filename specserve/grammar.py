"""Grammars by llguidance: from a GrammarSpec to one constraint per sequence.

Each sequence has a matcher built for it alone. The library's copies of a matcher share one lexer,
whose limits count what all of them have read: measured, one text that reached a limit ended the
texts of others, so their output would depend on batch mates. Building one costs about as much as
tokenizing a long prompt (a middling JSON schema: 1.6 ms), and happens off the loop.

The text is matched as bytes. Control tokens never match; EOS matches where the grammar may end.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING, Final

import llguidance
import numpy as np

from specserve.constraint import Behind, Constraint, GrammarSpec
from specserve.errors import ConstraintError, EngineError, RequestError
from specserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions  # exists in the stubs only

MAX_GRAMMAR_CHARS: Final = 256 * 1024
_MAX_REASON_CHARS: Final = 400
_EMPTY: Final = "no text but the empty one matches it"
_MAX_LEXER_STATES: Final = 50_000  # of 1 to 2 kB, per sequence
# Some models put out white space for ever wherever it is allowed.
_JSON_SPACE: Final[JsonCompileOptions] = {"whitespace_pattern": r"[ \n\t]{1,20}"}
_JSON_COMPACT: Final[JsonCompileOptions] = {"whitespace_flexible": False}


class Grammars:
    """One tokenizer's. All methods take milliseconds to seconds: call them off the loop."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @cached_property
    def _vocabulary(self) -> llguidance.LLTokenizer:
        return llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer)),
            eos_token=sorted(self._tokenizer.eos_ids),
        )

    def constraint(self, spec: GrammarSpec) -> Constraint:
        """For one sequence. RequestError names the field and the reason."""
        inner = self._from_the_beginning(spec)
        if spec.after is None:
            return inner
        tokenizer = self._tokenizer
        return Behind(
            inner, mark=spec.after, eos_ids=tokenizer.eos_ids, vocab_size=tokenizer.vocab_size
        )

    def _from_the_beginning(self, spec: GrammarSpec) -> GrammarConstraint:
        if len(spec.text) > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"{spec.param} has {len(spec.text)} characters, at most {MAX_GRAMMAR_CHARS} are "
                "allowed",
                param=spec.param,
            )
        if not self._tokenizer.spells_bytes or not self._tokenizer.eos_ids:
            raise RequestError(
                f"{spec.param} cannot be followed with this model: its tokens do not stand for "
                "fixed bytes, or it has no end-of-text token",
                param=spec.param,
                code="unsupported_parameter",
            )
        source = _source(spec)
        if self._tokenizer.strips_first_space:
            source = _behind_a_space(source)

        def make() -> llguidance.LLMatcher:
            limits = llguidance.LLParserLimits(
                max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False
            )
            return llguidance.LLMatcher(self._vocabulary, source, log_level=0, limits=limits)

        matcher = make()
        self._try(spec, matcher)
        return GrammarConstraint(matcher, make, self._tokenizer)

    def _try(self, spec: GrammarSpec, matcher: llguidance.LLMatcher) -> None:
        """RequestError unless some text can begin, and what was read can be taken back."""
        first = matcher.compute_bitmask()  # the first one sets much up
        if matcher.is_error():
            why = matcher.get_error()
            raise _bad(spec, _EMPTY if why.startswith("NoExtension") else why)
        bits = np.unpackbits(np.frombuffer(first, np.uint8), bitorder="little")
        begins = [
            idx for idx in np.flatnonzero(bits).tolist() if idx not in self._tokenizer.eos_ids
        ]
        if not begins:
            raise _bad(spec, _EMPTY)
        if not (matcher.consume_token(begins[0]) and matcher.rollback(1)):
            raise _bad(spec, matcher.get_error())


class _Vocabulary:
    """A Tokenizer as the library wants it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.special_token_ids = sorted(tokenizer.special_ids)
        self.tokens = [tokenizer.token_bytes(idx) for idx in range(tokenizer.vocab_size)]
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        """Where bytes are forced, a mask leaves only the token that this begins with."""
        plain = text.decode(errors="replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode_inside(plain)


def _source(spec: GrammarSpec) -> str:
    """As the library spells it. RequestError where the text is not what it should be."""
    try:
        match spec.kind:
            case "json_schema":
                options = _JSON_COMPACT if spec.compact else _JSON_SPACE
                return llguidance.LLMatcher.grammar_from_json_schema(spec.text, overrides=options)
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(spec.text)
            case "lark":
                return llguidance.LLMatcher.grammar_from_lark(spec.text)
            case "choice" | "grammar":
                return llguidance.grammar_from(spec.kind, spec.text)
    except ValueError as error:
        raise _bad(spec, str(error)) from error


def _behind_a_space(source: str) -> str:
    """The same text as these tokens spell it: their first space is not shown."""
    document = {"grammars": [{"lark_grammar": source}]}
    if source.startswith("{"):
        document = json.loads(source)
    first, *others = document["grammars"]
    start = {"lark_grammar": 'start: " " @text'}
    return json.dumps({"grammars": [start, {**first, "name": "text"}, *others]})


def _bad(spec: GrammarSpec, why: str) -> RequestError:
    reason = why.strip().removesuffix("<non-verbose/>").strip()
    if len(reason) > _MAX_REASON_CHARS:  # it quotes the text, before and after what is wrong
        reason = reason[max(0, reason.rfind("error: ")) :][:_MAX_REASON_CHARS]
    return RequestError(f"{spec.param} cannot be used: {reason}", param=spec.param)


class GrammarConstraint:
    """A Constraint: a matcher that walks to wherever it is asked about, back and forth.

    The library's limits count what a matcher has looked at, rejected guesses too: measured, those
    ended a text after 20 tokens instead of 37. So where one is reached, another matcher reads the
    text alone, as plain decoding would have, and only if that reaches it, too, the text ends.

    path: the output tokens it has read, the first `known` of them for good; an EOS at its end is
          not the matcher's
    """

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        make: Callable[[], llguidance.LLMatcher],
        tokenizer: Tokenizer,
    ) -> None:
        """make: another one, for the same grammar"""
        self._matcher = matcher
        self._make = make
        self._tokenizer = tokenizer
        self._eos_ids = tokenizer.eos_ids
        self._vocab_size = tokenizer.vocab_size
        self._path: list[int] = []
        self._known = 0
        self._masks: dict[int, bytes] = {}  # by length of the path

    def mask(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bytes | None:
        if not self._go(known, num_prompt, prefix):
            raise EngineError(
                f"the text cannot go on within its grammar at output token {len(self._path)}: "
                + (self._matcher.get_error() or "a token that does not match was put out")
            )
        if self._has_ended:
            return None
        found = self._masks.get(len(self._path))
        if found is None:
            found = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                self._renew()
                found = self._matcher.compute_bitmask()
            if self._matcher.is_error():
                why = self._matcher.get_error()
                raise ConstraintError(f"the grammar became too much work: {why}")
            self._masks[len(self._path)] = found
        return found

    def admits(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bool:
        return self._go(known, num_prompt, prefix)

    def forced(self, known: Seq[int], num_prompt: int, most: int) -> tuple[int, ...]:
        if not self._go(known, num_prompt, ()):
            return ()
        text = self._matcher.compute_ff_bytes().decode(errors="ignore")
        self._forward(self._tokenizer.encode_inside(text)[:most] if text else ())
        if self._matcher.is_stopped() and len(self._eos_ids) == 1 and not self._matcher.is_error():
            self._forward(tuple(self._eos_ids))
        return tuple(self._path[self._known : self._known + most])

    @property
    def _has_ended(self) -> bool:
        return bool(self._path) and self._path[-1] in self._eos_ids

    def _go(self, known: Seq[int], num_prompt: int, prefix: Seq[int]) -> bool:
        """Walk there; False if that is no path of the grammar: then to where it ceases to be."""
        if self._matcher.is_error():
            self._renew()
        num_known = len(known) - num_prompt
        agreed = min(self._known, num_known)
        ahead = (*known[num_prompt + agreed :], *prefix)
        pairs = zip(self._path[agreed:], ahead, strict=False)
        same = agreed + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._back(same)
        arrived = self._forward(ahead[same - agreed :])
        if num_known != self._known:
            self._known = min(num_known, len(self._path))
            self._masks = {at: mask for at, mask in self._masks.items() if at >= self._known}
        return arrived

    def _back(self, length: int) -> None:
        surplus = len(self._path) - length
        if surplus:
            self._matcher.rollback(surplus - self._has_ended)
            del self._path[length:]
            self._masks = {at: mask for at, mask in self._masks.items() if at <= length}

    def _forward(self, token_ids: Seq[int]) -> bool:
        for token_id in token_ids:
            if self._has_ended or not self._takes(token_id):
                return False
            self._path.append(token_id)
        return not self._matcher.is_error()

    def _takes(self, token_id: int) -> bool:
        if token_id in self._eos_ids:
            return self._matcher.is_accepting()
        if not 0 <= token_id < self._vocab_size:
            return False
        if self._matcher.try_consume_tokens([token_id]) == 1:
            return True
        if not self._matcher.is_error():
            return False
        self._renew()
        return self._matcher.try_consume_tokens([token_id]) == 1

    def _renew(self) -> None:
        """A matcher that has seen what it would have seen of this text without any guess."""
        self._matcher = self._make()
        for token_id in self._path[: len(self._path) - self._has_ended]:
            self._matcher.compute_bitmask()
            self._matcher.consume_token(token_id)
