"""What operators and clients ask of the server itself: models, health, readiness, metrics."""

from __future__ import annotations

from aiohttp import web

import specserve
from specserve.errors import RequestError
from specserve.server import errors
from specserve.server.answer import json_response
from specserve.server.job import check_model
from specserve.server.replies import ModelCard, ModelList, Status, Version
from specserve.server.state import STATE, ServerState


def _card(state: ServerState) -> ModelCard:
    engine = state.engine
    return ModelCard(
        id=engine.model_name,
        created=engine.created,
        root=engine.model_name,  # vLLM's load generator reads the model's name from here
        max_model_len=engine.limits.max_model_len,
    )


async def list_models(request: web.Request) -> web.Response:
    return json_response(ModelList(data=[_card(request.app[STATE])]))


async def get_model(request: web.Request) -> web.Response:
    state = request.app[STATE]
    check_model(state.engine, request.match_info["id"])
    return json_response(_card(state))


async def health(request: web.Request) -> web.Response:
    """200 while the engine lives, also while it drains."""
    error = request.app[STATE].engine.error
    if error is not None:
        raise errors.engine_dead(error)
    return json_response(Status("ok"))


async def ready(request: web.Request) -> web.Response:
    """200 while new requests are taken."""
    state = request.app[STATE]
    if not state.lifecycle.started:
        raise RequestError("the server is starting", code="server_starting", status=503)
    state.check_serving()
    return json_response(Status("ready"))


async def version(request: web.Request) -> web.Response:
    return json_response(Version(specserve.__version__))


async def metrics(request: web.Request) -> web.Response:
    page = request.app[STATE].metrics_page(request.headers.get("accept", ""))
    return web.Response(body=page.text.encode(), headers={"Content-Type": page.content_type})
