"""`specserve trace FILE`: the slowest requests, where their time went, and the steps around them.

All that can be said without a browser. Rotated parts of the file are read as well.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import median

from .otlp_reading import TraceFileError, read_spans
from .trace_facts import Guesses, Request, Step, Window, facts_of
from .trace_files import TraceFile, check_first_lines
from .trace_query import TraceQuery
from .trace_store import TraceStore

_DEFAULT_MEMORY_MB = 1024
_BAR_CHARS = 24
_MAX_POSITIONS = 8
_MAX_PHASES = 12
_TOLD_BLOCKED_SECONDS = 0.1
_INDENT = " " * 6


def summary_main(argv: Sequence[str]) -> int:
    """`specserve trace summary FILE`, without its first two words. Returns the exit status."""
    args = _parser().parse_args(argv)
    store = TraceStore(args.memory_mb * 2**20)
    try:
        check_first_lines(args.file)
        num_bad = _read(args.file, store)
    except (TraceFileError, OSError) as error:
        print(f"specserve trace: {error}", file=sys.stderr)
        return 1
    try:
        for line in summary_lines(store, str(args.file), args.slowest):
            print(line)
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0
    if num_bad:
        print(f"{num_bad} lines were left out: they are not OTLP JSON", file=sys.stderr)
    if store.num_evicted_traces:
        print(
            f"the {store.num_evicted_traces} oldest traces were left out: raise --memory-mb "
            f"from {args.memory_mb}",
            file=sys.stderr,
        )
    return 0


def summary_lines(store: TraceStore, name: str, num_slowest: int) -> Iterator[str]:
    facts = store.find(TraceQuery(limit=max(1, store.num_traces)), facts_of)
    requests = [one for one in facts if isinstance(one, Request)]
    windows = [one for one in facts if isinstance(one, Window)]
    steps = sorted((s for w in windows for s in w.steps), key=lambda step: step.start_ns)
    num_steps = sum(window.num_steps for window in windows)
    yield (
        f"{name}: {store.num_spans} spans, {_counted(len(requests), 'request')}, "
        f"{len(steps)} of {num_steps} engine steps kept"
    )
    if not requests:
        yield "no request came to the engine while this was written"
        return
    yield ""
    yield f"Where the time of {_counted(len(requests), 'request')} went"
    yield from _phase_table(requests)
    together = Guesses()
    for request in requests:
        together.add(request.guesses)
    yield f"Guesses: {_guess_text(together)}"
    yield ""
    yield "Slowest requests"
    slowest = sorted(requests, key=lambda request: -request.ns)[:num_slowest]
    for place, request in enumerate(slowest, start=1):
        yield from _request_lines(place, request, steps)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specserve trace",
        description="Summarise a trace file: the slowest requests, where their time went, the "
        "engine steps around them, and what speculation gave them.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="written by --trace-file")
    parser.add_argument(
        "--slowest", type=_positive, default=5, metavar="N", help="how many requests (default 5)"
    )
    parser.add_argument(
        "--memory-mb",
        type=_positive,
        default=_DEFAULT_MEMORY_MB,
        metavar="MB",
        help=f"how much is read in; the oldest traces go first (default {_DEFAULT_MEMORY_MB})",
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number: give 1 or more")
    return int(text)


def _read(path: Path, store: TraceStore) -> int:
    """Returns how many lines could not be read."""
    num_bad = 0
    file = TraceFile(path)
    for lines in (file.new_lines(), file.unfinished()):
        for line in lines:
            if not line.strip():
                continue
            try:
                store.add(read_spans(line))
            except TraceFileError:
                num_bad += 1
    file.close()
    return num_bad


def _phase_table(requests: Sequence[Request]) -> Iterator[str]:
    times: Counter[str] = Counter()
    for request in requests:
        times.update(request.phases)
    whole = sum(times.values()) or 1
    width = max(len(name) for name in times)
    for name, ns in times.most_common(_MAX_PHASES):
        bar = "█" * round(_BAR_CHARS * ns / whole)
        yield f"  {name:<{width}} {_time(ns):>9} {100 * ns / whole:5.1f} %  {bar}".rstrip()


def _request_lines(place: int, request: Request, steps: Sequence[Step]) -> Iterator[str]:
    ended = ", ".join(dict.fromkeys(request.finish_reasons)) or "?"
    yield (
        f"{place:>3}. {_time(request.ns)}  {request.name}  {request.request_id}  "
        f"{request.num_prompt_tokens} tokens in, {request.num_output_tokens} out, {ended}"
    )
    whole = sum(request.phases.values()) or 1
    shares = [
        f"{name} {_time(ns)} ({100 * ns / whole:.0f} %)"
        for name, ns in request.phases.items()
        if ns
    ]
    yield f"{_INDENT}{', '.join(shares)}"
    if request.error:
        yield f"{_INDENT}failed: {request.error}"
    if request.ttft_seconds is not None:
        preempted = f", preempted {request.num_preemptions} times" * bool(request.num_preemptions)
        yield f"{_INDENT}first token after {_time(int(request.ttft_seconds * 1e9))}{preempted}"
    if request.blocked_seconds >= _TOLD_BLOCKED_SECONDS:
        blocked = _time(int(request.blocked_seconds * 1e9))
        yield f"{_INDENT}the reply waited {blocked} for the client to read it"
    yield from _queue_lines(request, steps)
    yield from _step_lines(request, [step for step in steps if step.span_id in request.step_ids])
    yield f"{_INDENT}guesses: {_guess_text(request.guesses)}"
    yield f"{_INDENT}trace {request.trace_id}"


def _queue_lines(request: Request, steps: Sequence[Step]) -> Iterator[str]:
    """What the engine did meanwhile says why it waited."""
    for start, end, reason in request.queued:
        # Not the one that admitted it, in which the stay ended.
        beside = [step for step in steps if start < step.end_ns <= end]
        if not beside:
            continue
        prefill = sum(step.num_prefill_tokens for step in beside)
        widest = max(step.num_requests for step in beside)
        yield (
            f"{_INDENT}queued {_time(end - start)} ({reason}) beside "
            f"{_counted(len(beside), 'kept step')}: {prefill} prompt tokens of others, "
            f"up to {_counted(widest, 'request')} in a batch and "
            f"{max(step.num_waiting for step in beside)} waiting, "
            f"at least {min(step.num_blocks_free for step in beside)} KV blocks free"
        )


def _step_lines(request: Request, steps: Sequence[Step]) -> Iterator[str]:
    if not steps:
        yield f"{_INDENT}{request.num_steps} steps, none of them kept"
        return
    slowest = max(steps, key=lambda step: step.ns)
    yield (
        f"{_INDENT}{_counted(request.num_steps, 'step')}, {len(steps)} kept and linked: median "
        f"{_time(int(median(step.ns for step in steps)))}, slowest {_time(slowest.ns)} "
        f"(#{slowest.index} {slowest.kind}, {_counted(slowest.num_requests, 'request')}, "
        f"{slowest.num_tokens} tokens)"
    )
    times: Counter[str] = Counter()
    for step in steps:
        times.update(step.phases)
    whole = sum(times.values()) or 1
    shares = (f"{name} {100 * ns / whole:.0f} %" for name, ns in times.most_common(5))
    yield f"{_INDENT}in them: {', '.join(shares)}"


def _guess_text(guesses: Guesses) -> str:
    if not guesses.num_drafted:
        return "none"
    length = guesses.num_emitted / guesses.num_steps if guesses.num_steps else 0.0
    pairs = list(zip_longest(guesses.accepted_at, guesses.drafted_at, fillvalue=0))
    by_position = ", ".join(f"{one}/{of}" for one, of in pairs[:_MAX_POSITIONS])
    by_position += ", …" * (len(pairs) > _MAX_POSITIONS)
    return (
        f"{guesses.num_accepted} of {guesses.num_drafted} accepted "
        f"({100 * guesses.num_accepted / guesses.num_drafted:.1f} %), "
        f"{length:.2f} tokens per step with guesses; by position {by_position}; "
        f"by {', '.join(guesses.drafters)}"
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _time(ns: int) -> str:
    for unit, size in (("s", 10**9), ("ms", 10**6)):
        if ns >= size:
            return f"{ns / size:.{2 if ns < 10 * size else 1 if ns < 100 * size else 0}f} {unit}"
    return f"{ns / 1000:.0f} µs"
