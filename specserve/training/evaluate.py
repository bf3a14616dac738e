"""`specserve draft eval`: what a draft is worth, in the engine that serves, on any prompts.

Every request names the draft with exactly this K and width, so the controller has no say. Cost is
taken from steps of one row: the phases of the step records, against steps of the same engine in
which nobody guesses, run in between, so that other work on the machine disturbs both alike.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec
from tqdm import tqdm

from specserve.chat_template import render_chat
from specserve.errors import ConfigError
from specserve.llm import LLM
from specserve.loading import check_backend
from specserve.tokenizer import Tokenizer
from specserve.training.settings import parse_temperatures
from specserve.types import SamplingParams, SpecStats, Speculation
from specserve.weights import read_config, resolve_model
from specserve_loadgen.errors import LoadgenError
from specserve_loadgen.prompts import Prompt, load_prompts
from specserve_observability.metrics import Metrics
from specserve_observability.recorder import Recorder
from specserve_observability.records import StepRecord

PLAIN_EVERY = 4  # one prompt in so many is answered without guesses, too: steps to compare with


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Of one category at one temperature.

    tokens_per_step: emitted tokens per step that had guesses, the extra one included
    accepted: by position (in a tree: depth): share accepted of those whose parents were
    """

    category: str
    temperature: float
    num_prompts: int
    num_tokens: int
    num_steps: int
    tokens_per_step: float
    accepted: tuple[float, ...]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Medians over steps of one row, seconds."""

    target_step: float  # without guesses
    draft_per_step: float
    draft_per_token: float
    relative: float  # draft_per_token / target_step
    verify_step: float  # with all guesses, drafting left out


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    draft: str
    drafter: str
    model: str
    max_draft_tokens: int
    width: int
    scores: tuple[Score, ...]  # the category "all" first for each temperature
    cost: Cost | None  # None: no steps of one row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft", required=True, help="the draft's directory")
    parser.add_argument("--model", default="demo", help="the target, as for serve")
    parser.add_argument(
        "--prompts", default=None, help="as for loadgen (default: the shipped pack)"
    )
    parser.add_argument("--limit", type=int, default=0, help="first so many prompts; 0: all")
    parser.add_argument("--max-tokens", type=int, default=128, help="per answer (default: 128)")
    parser.add_argument("--temperature", default="0,0.7", help="by comma (default: 0,0.7)")
    parser.add_argument("--k", type=int, default=5, help="guesses per step (default: 5)")
    parser.add_argument("--width", type=int, default=1, help="children of a guess; 1: chains")
    parser.add_argument("--drafter", default=None, help="default: what the draft's config says")
    parser.add_argument("--concurrency", type=int, default=1, help="cost needs 1 (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="auto", help="the target's, as for serve")
    parser.add_argument("--draft-dtype", default="auto", help="as for serve")
    parser.add_argument("--backend", default="auto", help="as for serve")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--json", default=None, metavar="FILE", help="write the numbers there, too")


def run(options: argparse.Namespace) -> int:
    found = evaluate(options)
    print(render(found))
    if options.json is not None:
        document = msgspec.json.format(msgspec.json.encode(found), indent=2)
        Path(options.json).write_bytes(document + b"\n")
    return 0


def evaluate(options: argparse.Namespace) -> Evaluation:
    """ConfigError and ModelError say what to change."""
    temperatures = _check(options)
    check_backend(options.backend)
    prompts = _prompts(options)
    drafter = options.drafter or drafter_of(options.draft)
    recorder = Recorder(
        Metrics(drafters=(drafter,), max_draft_tokens=max(15, options.k)), has_sink=True
    )
    tokenizer = Tokenizer.load(resolve_model(options.model, _say))
    forced = Speculation(
        drafter=drafter, max_draft_tokens=options.k, draft_width=options.width, verify="replay"
    )
    answered: list[tuple[float, Prompt, SpecStats, int]] = []
    steps: list[StepRecord] = []
    with LLM(
        options.model,
        recorder=recorder,
        dtype=options.dtype,
        draft_dtype=options.draft_dtype,
        backend=options.backend,
        threads=options.threads,
        drafters=f"{drafter}:{options.draft}",
        speculation="fixed",
        draft_tokens=options.k,
        max_draft_tokens=max(15, options.k),
        max_num_seqs=options.concurrency,
    ) as llm:
        total = len(prompts) * len(temperatures)
        with tqdm(total=total, unit="prompt", desc="draft eval", disable=None) as bar:
            for start in range(0, len(prompts), options.concurrency):
                group = prompts[start : start + options.concurrency]
                ids = [_ids(tokenizer, prompt) for prompt in group]
                for temperature in temperatures:
                    params = SamplingParams(
                        temperature=temperature, max_tokens=options.max_tokens, seed=options.seed
                    )
                    results = llm.generate(ids, params, speculation=forced)
                    for prompt, result in zip(group, results, strict=True):
                        [output] = result.outputs
                        assert output.speculation is not None
                        count = len(output.token_ids)
                        answered.append((temperature, prompt, output.speculation, count))
                    bar.update(len(group))
                if start // options.concurrency % PLAIN_EVERY == 0:
                    params = SamplingParams(temperature=0, max_tokens=options.max_tokens)
                    llm.generate(ids, params, speculation=Speculation(drafter="none"))
                steps += recorder.steps.take()
                recorder.requests.take()
    return Evaluation(
        draft=options.draft,
        drafter=drafter,
        model=options.model,
        max_draft_tokens=options.k,
        width=options.width,
        scores=tuple(_scores(answered, temperatures)),
        cost=cost_of(steps),
    )


def drafter_of(draft: str) -> str:
    """The drafter that reads this directory. ModelError where it cannot be told."""
    config = read_config(resolve_model(draft))
    if config.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in config:
        return "eagle3"
    if "medusa_num_heads" in config:
        return "medusa"
    if config.get("model_type") == "mlp_speculator":
        return "mlp_speculator"
    return "draft_model"


def cost_of(steps: Seq[StepRecord]) -> Cost | None:
    """From steps of one decoding row, with and without guesses."""
    plain: list[float] = []
    draft: list[float] = []
    each: list[float] = []
    verify: list[float] = []
    for step in steps:
        if len(step.rows) != 1 or step.rows[0].is_prefill or step.error is not None:
            continue
        count = step.rows[0].num_draft_tokens
        spent = step.forward_start - step.draft_start
        rest = step.verify_end - step.forward_start
        if count:
            draft.append(spent)
            each.append(spent / count)
            verify.append(rest)
        elif step.rows[0].drafter == "none":
            plain.append(spent + rest)
    if not plain or not draft:
        return None
    target_step, per_token = statistics.median(plain), statistics.median(each)
    return Cost(
        target_step=target_step,
        draft_per_step=statistics.median(draft),
        draft_per_token=per_token,
        relative=per_token / target_step,
        verify_step=statistics.median(verify),
    )


def accepted_by_position(stats: Seq[SpecStats], num_positions: int) -> tuple[float, ...]:
    """Share accepted at each position of those steps in which all before it were accepted."""
    tried, right = [0] * num_positions, [0] * num_positions
    for one in stats:
        for drafted, accepted in zip(one.per_step_drafted, one.per_step_accepted, strict=True):
            for position in range(min(drafted, num_positions, accepted + 1)):
                tried[position] += 1
                right[position] += accepted > position
    return tuple(r / t if t else 0.0 for r, t in zip(right, tried, strict=True))


def render(found: Evaluation) -> str:
    lines = [
        f"{found.drafter} {found.draft} on {found.model}, K = {found.max_draft_tokens}, width "
        f"{found.width}",
        f"{'T':>4} {'category':16} {'prompts':>7} {'tokens':>8} {'steps':>7} {'tok/step':>8}  "
        "accepted by position",
    ]
    for one in found.scores:
        accepted = " ".join(f"{value:.3f}" for value in one.accepted)
        lines.append(
            f"{one.temperature:4g} {one.category:16} {one.num_prompts:7} {one.num_tokens:8,} "
            f"{one.num_steps:7,} {one.tokens_per_step:8.3f}  {accepted}"
        )
    if found.cost is not None:
        cost = found.cost
        lines.append(
            f"one row: target step {1e3 * cost.target_step:.2f} ms, draft "
            f"{1e3 * cost.draft_per_token:.2f} ms per drafted token = {cost.relative:.1%} of it, "
            f"step with guesses (drafting left out) {1e3 * cost.verify_step:.2f} ms"
        )
    return "\n".join(lines)


# ---- inside ------------------------------------------------------------------------------


def _scores(
    answered: Seq[tuple[float, Prompt, SpecStats, int]], temperatures: Seq[float]
) -> list[Score]:
    scores = []
    for temperature in temperatures:
        mine = [row for row in answered if row[0] == temperature]
        categories = list(dict.fromkeys(prompt.category for _, prompt, _, _ in mine))
        for category in ["all", *categories] if len(categories) > 1 else ["all"]:
            rows = [row for row in mine if category in ("all", row[1].category)]
            stats = [row[2] for row in rows]
            num_steps = sum(one.num_spec_steps for one in stats)
            emitted = sum(one.num_spec_emitted_tokens for one in stats)
            deepest = max((max(one.per_step_drafted, default=0) for one in stats), default=0)
            scores.append(
                Score(
                    category=category,
                    temperature=temperature,
                    num_prompts=len(rows),
                    num_tokens=sum(row[3] for row in rows),
                    num_steps=num_steps,
                    tokens_per_step=emitted / num_steps if num_steps else 0.0,
                    accepted=accepted_by_position(stats, deepest),
                )
            )
    return scores


def _check(options: argparse.Namespace) -> tuple[float, ...]:
    for name in ("max_tokens", "k", "width", "concurrency"):
        value = getattr(options, name)
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
    if options.limit < 0:
        raise ConfigError(f"--limit is {options.limit}, it must be at least 0")
    try:
        return parse_temperatures(options.temperature)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--temperatures", "--temperature", 1)) from error


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    try:
        found = load_prompts(options.prompts)
    except LoadgenError as error:
        raise ConfigError(str(error)) from error
    return found[: options.limit] if options.limit else found


def _ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode("\n".join(message.content for message in prompt.messages))
    messages = [{"role": one.role, "content": one.content} for one in prompt.messages]
    return render_chat(tokenizer, messages)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
