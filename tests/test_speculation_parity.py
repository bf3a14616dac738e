"""Every parameter under every drafter: the reply is that without speculation, or a 400 says why.

The table of it in specserve/README.md is written from parity_cases.py, whose every cell is asked
for here, over HTTP, of a small float64 decoder with real KV. Guesses are really made and some
of them are right, or the comparison would show nothing.
"""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from collections.abc import AsyncIterator
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any  # JSON

import pytest
import torch

from specserve.config import EngineConfig
from specserve.drafting import NO_DRAFT, Draft, Drafter, DraftRow
from specserve.models.decoder import Decoder
from specserve.server.state import ServerSettings
from specserve.types import Request
from specserve_drafts import DRAFTERS, DrafterResources
from tests.engines import ListRecorder
from tests.grammar_world import VOCAB_SIZE, bpe_tokenizer
from tests.guessers import HEADS, branching
from tests.http_server import Server, an_engine, over_http
from tests.parity_cases import CASES, COLUMNS, README, Case, Said, outcome, printed, root_of, table
from tests.raw_http import Reply
from tests.scripted import TOOL_TEMPLATE
from tests.tiny_heads import parts_of, tiny_head
from tests.tiny_models import tiny_decoder

pytestmark = pytest.mark.timeout(60)

ROOMY = EngineConfig(
    block_size=4,
    num_blocks=4096,
    max_model_len=1000,
    max_num_seqs=64,
    max_num_batched_tokens=1024,
    max_prefill_chunk=1024,
    max_draft_tokens=8,
)
# Prompts in pieces, preemptions, blocks of other requests, guesses only where there is room.
TIGHT = EngineConfig(
    block_size=4,
    num_blocks=260,
    max_model_len=1000,
    max_num_seqs=5,
    max_num_batched_tokens=24,
    max_prefill_chunk=7,
    max_draft_tokens=8,
)


class Notes:
    """Guesses nothing and writes every output down, for those that know the truth."""

    name = "notes"
    keeps_kv = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self) -> None:
        self._outputs: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def truth(self, request: Request) -> Seq[int] | None:
        return self._outputs.get((request.prompt_ids, request.seed))

    def read_output(self, request: Request, token_ids: Seq[int]) -> None:
        if request.drafter == "none":
            self._outputs[request.prompt_ids, request.seed] = tuple(token_ids)

    def propose(self, rows: Seq[DraftRow]) -> list[Draft]:
        return [NO_DRAFT] * len(rows)

    def forget(self, seq_id: int) -> None:
        return


@functools.cache
def model() -> Decoder:
    torch.set_num_threads(1)
    return tiny_decoder(vocab=VOCAB_SIZE, seed=3, dtype=torch.float64)


@functools.cache
def block_model() -> Decoder:
    """With one token more, the mask."""
    return tiny_decoder(vocab=VOCAB_SIZE + 1, seed=3, dtype=torch.float64)


@functools.cache
def block_config() -> str:
    directory = Path(tempfile.mkdtemp(prefix="specserve-parity-"))
    fields = {"model_type": "llama", "pard_token": VOCAB_SIZE}
    (directory / "config.json").write_text(json.dumps(fields))
    return str(directory)


def drafters(config: EngineConfig) -> dict[str, Drafter]:
    notes = Notes()
    models = {"draft_model": model(), "pard": block_model()}
    made: dict[str, Drafter] = {"notes": notes}
    for name in dict.fromkeys(str(column["drafter"]) for column in COLUMNS.values()):
        if name == "auto":
            continue
        made[name] = DRAFTERS["scripted" if name == "tree" else name](
            DrafterResources(
                argument={"pard": block_config()}.get(name, "tiny" if name in HEADS else None),
                vocab_size=VOCAB_SIZE,
                num_blocks=config.num_blocks,
                block_size=config.block_size,
                model=models.get(name),
                truth=notes.truth,
                script=branching(notes.truth, VOCAB_SIZE),
                target=parts_of(model()) if name in HEADS else None,
                head=tiny_head(name, model()) if name in HEADS else None,
            )
        )
    return made


@asynccontextmanager
async def a_server(config: EngineConfig = ROOMY) -> AsyncIterator[Server]:
    recorder = ListRecorder()
    tokenizer = bpe_tokenizer(TOOL_TEMPLATE)
    engine = an_engine(model(), config, recorder, tokenizer, drafters=drafters(config))
    settings = ServerSettings(grammar_seconds=100)
    async with over_http(engine, recorder, settings=settings) as server:
        yield server
        await server.is_idle()
    assert engine.error is None


# ---- asking ----------------------------------------------------------------------------------


async def body_of(server: Server, name: str) -> dict[str, Any]:
    case = CASES[name]
    if case.base is None:
        return case.fields(Said("", []))
    return {**await body_of(server, case.base), **case.fields(await said_of(server, case.base))}


_said: dict[str, Said] = {}


async def said_of(server: Server, name: str) -> Said:
    """Its first text without speculation, asked for once."""
    if name not in _said:
        reply = await ask(server, name, await body_of(server, name), {"drafter": "none"})
        [choice, *_] = reply.json()["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        _said[name] = Said(text or "", choice["token_ids"])
    return _said[name]


async def ask(
    server: Server, name: str, body: dict[str, Any], speculation: dict[str, object]
) -> Reply:
    return await server.post(CASES[root_of(name)].path, {**body, "speculation": speculation})


_OWN = {"id", "created", "created_at", "call_id", "item_id", "metrics"}
_COUNTS_OF_THE_CACHE = {"prompt_tokens_details", "input_tokens_details", "cache_read_input_tokens"}


def comparable(reply: Any) -> Any:
    """A reply without what is its own: ids, the time, what was cached, how much was guessed."""
    if isinstance(reply, list):
        return [comparable(part) for part in reply]
    if not isinstance(reply, dict):
        return reply
    if "cache_read_input_tokens" in reply:  # which are not among the others here
        total = reply["input_tokens"] + reply["cache_read_input_tokens"]
        reply = {**reply, "input_tokens": total}
    left_out = _OWN | _COUNTS_OF_THE_CACHE
    return {key: comparable(part) for key, part in reply.items() if key not in left_out}


def counts(reply: Reply) -> tuple[int, int]:
    """Guesses verified, and of those accepted."""
    metrics = reply.json()["metrics"]["speculative_decoding"]
    return metrics["num_draft_tokens"], metrics["num_accepted_draft_tokens"]


# ---- the matrix ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
async def test_whoever_guesses_the_reply_is_the_one_without_speculation(name: str) -> None:
    async with a_server() as server:
        await check_case(server, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
async def test_so_it_is_in_pieces_and_where_there_is_little_room(name: str) -> None:
    async with a_server(TIGHT) as server:
        await check_case(server, name, counted=False)


async def check_case(server: Server, name: str, *, counted: bool = True) -> None:
    """counted: whether guesses are known to be made, which takes room"""
    case = CASES[name]
    body = await body_of(server, name)
    expected = await ask(server, name, body, {"drafter": "none"})
    replies = await asyncio.gather(
        *(ask(server, name, body, speculation) for speculation in COLUMNS.values())
    )
    if case.refused is not None:
        for reply in (expected, *replies):
            check_refusal(reply, case.refused)
        return
    assert expected.status == 200, expected.body
    await check_difference(server, case, expected)
    for column, reply in zip(COLUMNS, replies, strict=True):
        assert reply.status == 200, (column, reply.body)
        assert comparable(reply.json()) == comparable(expected.json()), column
        if counted:
            check_guesses(case, column, reply)


def check_refusal(reply: Reply, param: str) -> None:
    assert reply.status == 400
    assert reply.error["param"] == param
    assert param.split(".")[-1] in reply.error["message"]


async def check_difference(server: Server, case: Case, reply: Reply) -> None:
    """The parameter does something here, so that it could go wrong."""
    if case.base is None:
        return
    without = await ask(server, case.base, await body_of(server, case.base), {"drafter": "none"})
    assert comparable(reply.json()) != comparable(without.json())


def check_guesses(case: Case, column: str, reply: Reply) -> None:
    num_drafted, num_accepted = counts(reply)
    if column == "auto":  # its own choice, which may be to guess nothing
        return
    assert (num_drafted == 0) == (column in case.quiet), (column, num_drafted)
    if column in ("oracle", "oracle tree", "draft_model") and num_drafted:
        assert num_accepted > 0, column
    if column == "anti" and num_drafted:
        assert num_accepted < num_drafted


def test_the_table_in_the_readme_is_this_one() -> None:
    text = README.read_text()
    start, end = printed(text)
    assert text[start:end] == table(), "write it anew: python -m tests.parity_cases"


def test_in_most_cells_guesses_are_made() -> None:
    cells = [outcome(case, column) for case in CASES.values() for column in COLUMNS]
    assert cells.count("=") > 0.8 * len(cells)
