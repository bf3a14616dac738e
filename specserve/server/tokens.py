"""POST /tokenize, /detokenize: what the tokenizer makes of a text, shaped as vLLM's."""

from __future__ import annotations

from aiohttp import web

from specserve.errors import RequestError
from specserve.server.answer import json_response
from specserve.server.body import read_body
from specserve.server.conversation import encode_conversation
from specserve.server.job import check_model
from specserve.server.prompts import check_ids, encode_prompts
from specserve.server.replies import DetokenizeReply, TokenizeReply
from specserve.server.state import STATE
from specserve.server.wire import ChatBody, DetokenizeBody, TokenizeBody, convert_body

_OF_A_CHAT = (
    "model",
    "messages",
    "tools",
    "chat_template_kwargs",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
)


async def tokenize(request: web.Request) -> web.Response:
    engine = request.app[STATE].engine
    body = await read_body(request, TokenizeBody)
    check_model(engine, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt")
    if body.prompt is None:
        chat = {name: getattr(body, name) for name in _OF_A_CHAT}
        token_ids = await encode_conversation(request.app[STATE], convert_body(chat, ChatBody))
    else:
        [token_ids] = await encode_prompts(
            engine, [body.prompt], add_special_tokens=body.add_special_tokens is not False
        )
    names = None
    if body.return_token_strs:
        names = [engine.tokenizer.token_text(token_id) for token_id in token_ids]
    return json_response(
        TokenizeReply(
            count=len(token_ids),
            max_model_len=engine.limits.max_model_len,
            tokens=token_ids,
            token_strs=names,
        )
    )


async def detokenize(request: web.Request) -> web.Response:
    engine = request.app[STATE].engine
    body = await read_body(request, DetokenizeBody)
    check_model(engine, body.model)
    if body.tokens is None:
        raise RequestError("tokens is required: give a list of token ids", param="tokens")
    check_ids(body.tokens, engine.limits.vocab_size, "tokens")
    text = await engine.run_off_loop(engine.tokenizer.decode, body.tokens)
    return json_response(DetokenizeReply(text))
