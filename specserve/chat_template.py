"""Messages to prompt ids through the model's own Jinja template, which is untrusted code.

The template comes with a download and runs in Jinja's immutable sandbox, over plain JSON data,
with a cap on what it may write. What it renders is encoded with special tokens parsed and nothing
added, exactly as transformers does. The one difference is on purpose: special tokens spelt out in
a request's own strings stay text, so nobody can close the user's turn and open a system one. Such
text is marked with a random number before rendering, found again afterwards, and encoded plain.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any  # JSON values and Jinja's own types

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from specserve.errors import RequestError
from specserve.tokenizer import Tokenizer

MAX_RENDERED_CHARS = 16 << 20  # a runaway template ends here; a prompt of this size fits no model

Message = Mapping[str, Any]


def render_chat(
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Prompt ids of a conversation.

    messages: `{"role", "content", ...}`; content is a string or a list of text parts
    continue_final_message: the reply goes on with the last message's text instead of a new turn
    template_kwargs: further variables of the template; those it defines itself cannot be replaced

    Raises RequestError: no template, a template that refuses the messages (its own words are in
    the message), parts that are not text, a final message that cannot be continued.
    """
    if tokenizer.chat_template is None:
        raise RequestError(
            "this model has no chat template, so it cannot serve chat: use /v1/completions",
            param="messages",
        )
    if not messages:
        raise RequestError("messages is empty: send at least one message", param="messages")
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other: the last message "
            "is continued, or a new one begun",
            param="continue_final_message",
        )
    guard = _Guard(tokenizer)
    own: dict[str, Any] = {
        **tokenizer.special_tokens,
        "messages": [guard.marked(_plain_message(m, idx)) for idx, m in enumerate(messages)],
        "tools": guard.marked(tools),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    extra = guard.marked(dict(template_kwargs or {}))
    if clash := sorted(own.keys() & extra.keys()):
        raise RequestError(
            f"chat_template_kwargs may not set {clash[0]!r}, which the server sets itself",
            param="chat_template_kwargs",
        )
    if continue_final_message:
        own["messages"][-1] = guard.with_end_marked(own["messages"][-1])
    rendered = _render(tokenizer.chat_template, {**extra, **own})
    if continue_final_message:
        rendered = guard.cut_at_end_mark(rendered)
    return guard.encode(rendered)


def _plain_message(message: Message, message_idx: int) -> dict[str, Any]:
    """Without null fields (templates would print None), and with text parts joined."""
    plain = {key: value for key, value in message.items() if value is not None}
    if isinstance(content := plain.get("content"), list):
        where = f"messages[{message_idx}].content"
        plain["content"] = "".join(_part_text(part, where) for part in content)
    # The field under which current templates look for earlier reasoning
    reasoning = plain.get("reasoning_content", plain.get("reasoning"))
    return plain if reasoning is None else {**plain, "reasoning_content": reasoning}


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind != "text":
        raise RequestError(
            f"{where} has a part of type {kind!r}; this server reads only text parts",
            param="messages",
        )
    if not isinstance(text := part.get("text"), str):
        raise RequestError(f"{where} has a text part without text", param="messages")
    return text


class _Guard:
    """Keeps special tokens in a request's strings apart from those the template writes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special = tokenizer.special_pattern
        nonce = str(secrets.randbits(96))
        # Digits pass unchanged through whatever filter a template applies (upper, tojson, trim)
        self._start, self._end, self._last = f"{nonce}1", f"{nonce}2", f"{nonce}3 "
        self._found = False

    def marked(self, value: Any) -> Any:
        """`value` with the special tokens in all its strings wrapped in marks."""
        if isinstance(value, str):
            marked = self._special.sub(lambda m: f"{self._start}{m[0]}{self._end}", value)
            self._found = self._found or marked != value
            return marked
        if isinstance(value, dict):
            return {self._key(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.marked(item) for item in value]
        return value

    def encode(self, rendered: str) -> list[int]:
        if not self._found:
            return self._tokenizer.encode(rendered, add_special_tokens=False)
        return self._tokenizer.encode_pieces(self._pieces(rendered))

    def with_end_marked(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message to continue, marked where the model is to go on."""
        if not isinstance(content := message.get("content"), str):
            raise RequestError(
                "continue_final_message is set but the last message has no text content",
                param="continue_final_message",
            )
        return {**message, "content": content + self._last}

    def cut_at_end_mark(self, rendered: str) -> str:
        """What comes before the mark; a template that trims has cut the mark's own space off."""
        at = rendered.rfind(self._last.rstrip())
        if at < 0:
            raise RequestError(
                "continue_final_message is set but the model's chat template does not print the "
                "last message as it is, so it cannot be continued",
                param="continue_final_message",
            )
        before = rendered[:at]
        return before if rendered.startswith(self._last, at) else before.rstrip()

    def _key(self, key: Any) -> Any:
        """A key with a special token in it cannot be marked (templates look keys up): refuse it."""
        if isinstance(key, str) and self._special.search(key):
            raise RequestError(
                f"a field is named {key!r}, which holds one of the model's special tokens",
                param="messages",
            )
        return key

    def _pieces(self, rendered: str) -> list[tuple[bool, str]]:
        """(is a control token the template wrote, text) in order, marks removed.

        A template may cut a marked string so that one mark is left alone: it is dropped, and a
        token is the request's as soon as one of its marks is still beside it.
        """
        start, end = re.escape(self._start), re.escape(self._end)
        token = self._special.pattern
        own = f"{start}(?:{token})(?:{end})?|(?:{token}){end}"
        scanner = re.compile(f"(?P<own>{own})|{start}|{end}|(?P<control>{token})")
        pieces: list[tuple[bool, str]] = []
        plain: list[str] = []
        at = 0
        for match in scanner.finditer(rendered):
            plain.append(rendered[at : match.start()])
            at = match.end()
            if match["own"]:
                plain.append(match["own"].replace(self._start, "").replace(self._end, ""))
            elif match["control"]:
                pieces += [(False, "".join(plain)), (True, match["control"])]
                plain = []
        pieces.append((False, "".join(plain) + rendered[at:]))
        return [piece for piece in pieces if piece[1]]


def _render(template: str, variables: dict[str, Any]) -> str:
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in _compile(template).generate(**variables):
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                break
            pieces.append(piece)
    except jinja2.TemplateError as error:
        raise RequestError(
            f"the model's chat template refuses these messages: {error}", param="messages"
        ) from error
    except Exception as error:  # templates meet data they do not expect: None + str, KeyError, ...
        raise RequestError(
            f"the model's chat template cannot render these messages "
            f"({type(error).__name__}: {error})",
            param="messages",
        ) from error
    if num_chars > MAX_RENDERED_CHARS:
        raise RequestError(
            f"the chat template wrote more than {MAX_RENDERED_CHARS} characters for these "
            "messages: shorten them",
            param="messages",
        )
    return "".join(pieces)


def takes_tools(template: str) -> bool:
    """Whether a template reads the variable `tools`; one that cannot be parsed reads nothing."""
    try:
        tree = _environment().parse(template)
    except jinja2.TemplateSyntaxError:
        return False
    return "tools" in jinja2.meta.find_undeclared_variables(tree)


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    """Raises jinja2.TemplateSyntaxError."""
    return _environment().from_string(template)


def _environment() -> ImmutableSandboxedEnvironment:
    """With the conventions of Hugging Face templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _PublicNamespace
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; here it only prints its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 reads it from the class

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> str:
        return str(caller())


class _PublicNamespace(Namespace):
    """Jinja's namespace without names that reach into Python."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_string: str) -> str:
    return datetime.now().strftime(format_string)
