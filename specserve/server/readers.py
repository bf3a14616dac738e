"""Which reader a reply needs: chosen once per server, made once per choice of a reply."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Literal

import msgspec

from specserve.chat_template import takes_tools
from specserve.errors import RequestError
from specserve.server.call_reader import CALL_FORMATS, CallFormat, CallReader
from specserve.server.parts import PlainReader, Reader
from specserve.server.thinking import CLOSES, OPENS, ThinkReader
from specserve.server.tools import ToolUse
from specserve.tokenizer import Tokenizer
from specserve.types import SamplingParams

# By name, as vLLM calls them.
REASONING: dict[str, Literal["none", "marked", "always"]] = {
    "none": "none",
    "qwen3": "marked",
    "deepseek_r1": "always",
}
_END_TOKENS = 32  # enough for a mark and white space, whatever the tokenizer


class ReplyFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the model that is served writes its replies.

    calls:       None: not in a way that is known here
    reasoning:   none; where its opening mark is, in the prompt or the reply; or always first
    takes_tools: whether its chat template tells the model of functions
    special:     marks that are control tokens, which replies leave out unless told otherwise
    """

    calls: CallFormat | None
    reasoning: Literal["none", "marked", "always"]
    takes_tools: bool
    special: frozenset[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_call_parser: str, reasoning_parser: str) -> ReplyFormat:
        """tool_call_parser: a name of CALL_FORMATS, none, or auto: by what the template writes
        reasoning_parser: a name of REASONING, or auto
        """
        template = tokenizer.chat_template or ""
        takes = takes_tools(template)
        name = _call_format_of(template, takes) if tool_call_parser == "auto" else tool_call_parser
        calls = CALL_FORMATS.get(name)
        if reasoning_parser == "auto":
            reasoning_parser = "qwen3" if CLOSES in template else "none"
        marks = {calls.opens, calls.closes, OPENS, CLOSES} if calls else {OPENS, CLOSES}
        return cls(
            calls=calls,
            reasoning=REASONING[reasoning_parser],
            takes_tools=takes,
            special=frozenset(
                mark for mark in marks if tokenizer.token_id(mark) in tokenizer.special_ids
            ),
        )

    def check(self, tools: ToolUse) -> None:
        """RequestError where the model's calls cannot be read."""
        if not tools.names:
            return
        if self.calls is None:
            raise RequestError(
                "tools cannot be used: how this model writes calls is not known here: start the "
                f"server with --tool-call-parser {' or '.join(CALL_FORMATS)}",
                param="tools",
                code="unsupported_parameter",
            )

    @property
    def told_in_text(self) -> CallFormat | None:
        """How calls are written where only messages can tell the model of tools; None: its chat
        template does."""
        return None if self.takes_tools else self.calls

    def reader(self, tools: ToolUse, *, reasoning_opened: bool) -> Reader:
        """reasoning_opened: by the prompt"""
        then: Reader = PlainReader()
        if tools.names and self.calls is not None:
            then = CallReader(self.calls, tools.names, tools.max_calls)
        if self.reasoning == "none":
            return then
        return ThinkReader(then, opened=self.begins_with_reasoning(reasoning_opened))

    def begins_with_reasoning(self, opened: bool) -> bool:
        """opened: by the prompt"""
        return self.reasoning == "always" or (self.reasoning == "marked" and opened)

    def readable(self, params: SamplingParams, tools: ToolUse) -> SamplingParams:
        """With marks that are control tokens in the text, where they are looked for."""
        wanted = set[str]() if self.reasoning == "none" else {OPENS, CLOSES}
        if tools.names and self.calls:
            wanted |= {self.calls.opens, self.calls.closes}
        if not wanted & self.special:
            return params
        return msgspec.structs.replace(params, skip_special_tokens=False)


def reasoning_opened(tokenizer: Tokenizer, prompt_ids: Seq[int], continued: str) -> bool:
    """Whether a reply to this prompt begins inside of reasoning.

    continued: the text of the assistant's that it goes on with. Elsewhere only a mark at the
    prompt's very end counts, which is the template's: users may write of marks, too.
    """
    if OPENS in continued:
        return CLOSES not in continued[continued.rfind(OPENS) :]
    end = tokenizer.decode(prompt_ids[-_END_TOKENS:], skip_special_tokens=False)
    return end.rstrip().endswith(OPENS)


def _call_format_of(template: str, takes_tools: bool) -> str:
    """What a template writes into the history is what its model writes. Where it knows nothing of
    tools, messages tell the model how to write calls."""
    if not takes_tools:
        return "hermes"
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "<|python_tag|>" in template or '{"name": function name, "parameters":' in template:
        return "llama3_json"
    return "none"
