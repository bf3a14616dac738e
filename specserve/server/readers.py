"""Which reader a reply needs: chosen once per server, made once per choice of a reply."""

from __future__ import annotations

import msgspec

from specserve.chat_template import takes_tools
from specserve.errors import RequestError
from specserve.server.call_reader import CALL_FORMATS, CallFormat, CallReader
from specserve.server.parts import PlainReader, Reader
from specserve.server.tools import ToolUse
from specserve.tokenizer import Tokenizer
from specserve.types import SamplingParams


class ReplyFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How the model that is served writes its replies.

    calls:       None: not in a way that is known here
    takes_tools: whether its chat template tells the model of functions
    special:     marks that are control tokens, which replies leave out unless told otherwise
    """

    calls: CallFormat | None
    takes_tools: bool
    special: frozenset[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer, tool_call_parser: str) -> ReplyFormat:
        """tool_call_parser: a name of CALL_FORMATS, none, or auto: by what the template writes"""
        template = tokenizer.chat_template or ""
        name = _call_format_of(template) if tool_call_parser == "auto" else tool_call_parser
        calls = CALL_FORMATS.get(name)
        marks = {calls.opens, calls.closes} if calls else set()
        return cls(
            calls=calls,
            takes_tools=takes_tools(template),
            special=frozenset(
                mark for mark in marks if tokenizer.token_id(mark) in tokenizer.special_ids
            ),
        )

    def check(self, tools: ToolUse) -> None:
        """RequestError where the model cannot be told of tools, or its calls cannot be read."""
        if not tools.names:
            return
        if not self.takes_tools:
            why = "this model's chat template cannot tell it of tools: serve one that was made "
            why += "for them, or describe them in a message"
        elif self.calls is None:
            why = "how this model writes calls is not known here: start the server with "
            why += f"--tool-call-parser {' or '.join(CALL_FORMATS)}"
        else:
            return
        raise RequestError(
            f"tools cannot be used: {why}", param="tools", code="unsupported_parameter"
        )

    def reader(self, tools: ToolUse) -> Reader:
        if not tools.names or self.calls is None:
            return PlainReader()
        return CallReader(self.calls, tools.names, tools.max_calls)

    def readable(self, params: SamplingParams, tools: ToolUse) -> SamplingParams:
        """With marks that are control tokens in the text, where they are looked for."""
        if not tools.names or not self.special:
            return params
        return msgspec.structs.replace(params, skip_special_tokens=False)


def _call_format_of(template: str) -> str:
    """What a template writes into the history is what its model writes."""
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "<|python_tag|>" in template or '{"name": function name, "parameters":' in template:
        return "llama3_json"
    return "none"
