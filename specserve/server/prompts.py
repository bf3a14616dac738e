"""From prompts and messages to token ids, never on the event loop.

Text that cannot fit is refused before it is tokenized: a tokenizer's time grows with the text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any, NamedTuple  # Any: JSON that is passed on as it is

from specserve.admission import Limits, check_bad_words
from specserve.bad_words import bad_word_ids
from specserve.chat_template import render_chat
from specserve.engine import Engine
from specserve.errors import RequestError
from specserve.server.call_reader import CallFormat
from specserve.server.tool_prompt import told_in_text
from specserve.server.tools import ToolUse, calls_for_template
from specserve.server.wire import ChatBody, ContentPart, Extensions, MessageBody, Prompt

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
# Whether to reason, as Qwen's and DeepSeek's templates ask.
TEMPLATE_SWITCHES = ("enable_thinking", "thinking")
# Long tokens are rare: text with more characters per token of context than this cannot fit.
MAX_CHARS_PER_TOKEN = 16


def split_prompts(prompt: Prompt | None) -> list[str | list[int]]:
    """One entry per prompt: a text, or token ids. RequestError names `prompt`."""
    if prompt is None:
        raise RequestError("prompt is required: give a text or token ids", param="prompt")
    if isinstance(prompt, str):
        return [_not_empty(prompt)]
    if not prompt:
        raise RequestError("prompt is an empty list: give a text or token ids", param="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) == len(prompt):
        return [ids]
    texts = [item for item in prompt if isinstance(item, str)]
    if len(texts) == len(prompt):
        return [_not_empty(text) for text in texts]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(lists) == len(prompt):
        return [_not_empty(item) for item in lists]
    raise RequestError(
        "prompt mixes kinds: give a text, a list of texts, token ids, or a list of lists of "
        "token ids",
        param="prompt",
    )


def _not_empty(prompt: str | list[int]) -> str | list[int]:
    if not prompt:
        raise RequestError("prompt is empty: it must have at least one token", param="prompt")
    return prompt


def check_text_size(num_chars: int, max_model_len: int, param: str) -> None:
    if num_chars > MAX_CHARS_PER_TOKEN * max_model_len:
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, {param} has "
            f"{num_chars} characters, more than {MAX_CHARS_PER_TOKEN} for each of them, so the "
            "prompt is too long: shorten it",
            param=param,
            code="context_length_exceeded",
        )


async def encode_prompts(
    engine: Engine, prompts: Seq[str | list[int]], *, add_special_tokens: bool
) -> list[list[int]]:
    for prompt in prompts:
        if isinstance(prompt, str):
            check_text_size(len(prompt), engine.limits.max_model_len, "prompt")

    def encode() -> list[list[int]]:
        return [
            list(engine.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
            if isinstance(prompt, str)
            else prompt
            for prompt in prompts
        ]

    if not any(isinstance(prompt, str) for prompt in prompts):
        return encode()
    return await engine.run_off_loop(encode)


def truncated(token_ids: list[int], wanted: int | None, limits: Limits) -> list[int]:
    """A prompt's last `wanted` tokens; -1: as many as the context holds beside one of output."""
    if wanted is None:
        return token_ids
    room = limits.max_model_len - 1
    if wanted != -1 and not 1 <= wanted <= room:
        raise RequestError(
            f"truncate_prompt_tokens is {wanted}, it must be -1 or from 1 to {room}",
            param="truncate_prompt_tokens",
        )
    return token_ids[-(room if wanted == -1 else wanted) :]


async def encode_chat(
    engine: Engine, body: ChatBody, tools: ToolUse, *, tell_in_text: CallFormat | None
) -> list[int]:
    """The prompt of a conversation through the model's chat template.

    tell_in_text: the chat template knows no tools, so messages tell of them; None: it does
    """
    plain, for_template = plain_messages(body.messages), tools.for_template
    _check_ending(body, plain)
    _check_sizes(plain, for_template, engine.limits.max_model_len)
    if tell_in_text is not None:
        plain, for_template = told_in_text(plain, for_template, tell_in_text), []
    switches = _switches(body.chat_template_kwargs)
    continued = bool(body.continue_final_message)

    def render() -> list[int]:
        return list(
            render_chat(
                engine.tokenizer,
                plain,
                tools=for_template or None,
                template_kwargs=switches,
                add_generation_prompt=body.add_generation_prompt is not False and not continued,
                continue_final_message=continued,
            )
        )

    return await engine.run_off_loop(render)


def _check_ending(body: ChatBody, plain: list[dict[str, Any]]) -> None:
    """Templates write their own special tokens, so add_special_tokens would double the first."""
    if body.add_special_tokens:
        raise RequestError(
            "add_special_tokens is true, but the chat template adds them itself: leave it out",
            param="add_special_tokens",
            code="unsupported_parameter",
        )
    if not body.continue_final_message:
        return
    if body.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt are both true: choose one",
            param="continue_final_message",
        )
    if plain[-1]["role"] != "assistant":
        raise RequestError(
            "continue_final_message is true but the last message is not the assistant's",
            param="continue_final_message",
        )


def _check_sizes(
    plain: list[dict[str, Any]], tools: list[dict[str, Any]], max_model_len: int
) -> None:
    if len(plain) > max_model_len:  # templates spend a token at least on each
        raise RequestError(
            f"This model's maximum context length is {max_model_len} tokens. However, messages has "
            f"{len(plain)} messages, so the prompt is too long: send fewer",
            param="messages",
            code="context_length_exceeded",
        )
    check_text_size(_num_chars(plain), max_model_len, "messages")
    check_text_size(_num_chars(tools), max_model_len, "tools")


def _switches(asked: dict[str, Any] | None) -> dict[str, bool]:
    """No other variables: what a template does with its own is unknown."""
    switches: dict[str, bool] = {}
    for name, value in (asked or {}).items():
        if name not in TEMPLATE_SWITCHES or not isinstance(value, bool | None):
            raise RequestError(
                f"chat_template_kwargs sets {name[:64]!r}, this server takes only true or false "
                f"for: {', '.join(TEMPLATE_SWITCHES)}",
                param="chat_template_kwargs",
            )
        if value is not None:
            switches[name] = value
    return switches


def _num_chars(value: object) -> int:
    """Of all texts in JSON data."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(len(key) + _num_chars(inner) for key, inner in value.items())
    return sum(map(_num_chars, value)) if isinstance(value, list) else 0


def plain_messages(messages: list[MessageBody] | None) -> list[dict[str, Any]]:
    """Roles, text and calls, as templates take them. RequestError names messages[i].field."""
    if not messages:
        raise RequestError("messages is empty: it must have at least one message", param="messages")
    return [_plain_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _plain_message(message: MessageBody, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role is {message.role[:64]!r}, it must be one of: {', '.join(ROLES)}",
            param=f"{where}.role",
        )
    if message.function_call:
        raise RequestError(
            f"{where}.function_call is not supported by this server: use tool_calls",
            param=f"{where}.function_call",
            code="unsupported_parameter",
        )
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{where}.tool_calls is given, but only the assistant makes calls",
            param=f"{where}.tool_calls",
        )
    plain: dict[str, Any] = {
        # Newer clients call it developer; templates know it as system.
        "role": "system" if message.role == "developer" else message.role,
        "content": _content_text(message, where),
    }
    if message.name is not None:
        plain["name"] = message.name
    if (reasoning := message.reasoning_content or message.reasoning) is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        plain["tool_calls"] = calls_for_template(message.tool_calls)
    return plain


def _content_text(message: MessageBody, where: str) -> str:
    if message.content is None:
        if message.role != "assistant":
            raise RequestError(
                f"{where}.content is missing: it must be a text", param=f"{where}.content"
            )
        return ""
    return text_of(message.content, f"{where}.content")


def text_of(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise RequestError(
                f"{where}[{i}] is of type {part.type[:64]!r}, this server reads only parts "
                "of type 'text'",
                param=f"{where}[{i}]",
                code="unsupported_parameter",
            )
    return "".join(part.text or "" for part in content)


class Beside(NamedTuple):
    """Token ids of texts beside the prompt.

    prediction: the output that the client expects; empty if it expects nothing
    bad_words:  sequences that are never put out
    """

    prediction: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]


async def encode_beside(engine: Engine, body: Extensions) -> Beside:
    """RequestError names the field."""
    words = tuple(body.bad_words or ())
    check_bad_words(words)
    text = ""
    if body.prediction is not None and body.prediction.content:
        text = text_of(body.prediction.content, "prediction.content")
        check_text_size(len(text), engine.limits.max_model_len, "prediction.content")
    if not words and not text:
        return Beside((), ())

    def encode() -> Beside:
        tokenizer = engine.tokenizer
        prediction = tokenizer.encode(text, add_special_tokens=False) if text else ()
        return Beside(tuple(prediction), bad_word_ids(tokenizer, words))

    return await engine.run_off_loop(encode)


def check_ids(token_ids: Seq[int], vocab_size: int, param: str) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param} holds token id {token_id}, this model's ids are 0 to {vocab_size - 1}",
                param=param,
            )
