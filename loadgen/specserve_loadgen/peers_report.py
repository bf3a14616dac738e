"""A comparison as one schema-versioned value, its medians and ratios, and its tables.

A ratio is made within each round, from measurements taken minutes apart, and the median of the
rounds' ratios is shown: a machine that is slower in one round slows both sides of it. The best
peer of a class is the one with the highest median rate, chosen per cell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

import msgspec

from specserve_loadgen.peers_measure import Cell, Measured
from specserve_loadgen.peers_process import Environment, Memory
from specserve_loadgen.peers_servers import OURS, Server

SCHEMA_VERSION = 1
NOISY_CORES = 0.2  # busy before a server starts: its numbers are disturbed


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int
    concurrency: tuple[int, ...]
    max_tokens: int
    peers: tuple[str, ...]
    only: tuple[str, ...]  # parts of servers' names; (): all
    prompts_file: str | None  # None: the shipped pack
    serve: tuple[str, ...]  # our command line
    auto: tuple[str, ...]  # flags of ours with speculation


class TurnNotes(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one server."""

    server: str
    round_idx: int
    busy_cores_before: float  # by all processes, before it was started
    start_seconds: float | None = None  # to the first answered request; None: it never answered
    idle_cores: float | None = None  # that it kept busy while no request ran
    memory: Memory | None = None  # after the last cell
    error: str | None = None


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = SCHEMA_VERSION
    kind: str = "specserve.loadgen.peers"
    started_at: float  # Unix seconds
    environment: Environment
    settings: PeerSettings
    servers: tuple[Server, ...]
    left_out: dict[str, str]
    turns: tuple[TurnNotes, ...]
    measured: tuple[Measured, ...]
    ratios: tuple[Ratio, ...] = ()


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Ours over another server's in one cell. Above 1: ours is faster."""

    claim: str  # what is compared, for people
    cell: str
    ours: str
    other: str
    ours_rate: float  # tokens/s, median of the rounds
    other_rate: float
    ratio: float  # median of the rounds' ratios
    per_round: tuple[float, ...]


def complete(report: PeerReport) -> PeerReport:
    """The report with its ratios, computed from what was measured."""
    return msgspec.structs.replace(report, ratios=tuple(make_ratios(report)))


def rates(report: PeerReport, server: str, cell: Cell) -> dict[int, float]:
    """tokens/s by round, of the rounds in which no request of the cell failed."""
    return {
        one.round_idx: one.tokens_per_second
        for one in report.measured
        if one.server == server and one.cell == cell and not one.num_failed
    }


def cells_of(report: PeerReport) -> list[Cell]:
    """In the order in which they were first measured."""
    return list(dict.fromkeys(one.cell for one in report.measured))


def make_ratios(report: PeerReport) -> list[Ratio]:
    """What issue-level claims are about: each of ours against the best rival of several kinds."""
    found: list[Ratio] = []
    for ours in (server for server in report.servers if server.peer == OURS):
        for claim, rivals in _claims(report.servers, ours):
            for cell in cells_of(report):
                ratio = _best_ratio(report, claim, ours, rivals, cell)
                if ratio is not None:
                    found.append(ratio)
    return found


def _claims(servers: Sequence[Server], ours: Server) -> Iterable[tuple[str, list[Server]]]:
    peers = [server for server in servers if server.peer != OURS]
    if ours.speculation == "off":
        plain = [server for server in peers if server.speculation == "off"]
        same = [server for server in plain if server.precision == ours.precision]
        yield f"best {ours.precision} peer", same
        yield "best peer of any precision", plain
        return
    same = [server for server in peers if server.precision == ours.precision]
    yield f"best {ours.precision} peer, its speculation on or off", same
    yield "best peer of any precision, its speculation on or off", peers
    yield (
        "ours without speculation",
        [
            server
            for server in servers
            if server.peer == OURS
            and server.precision == ours.precision
            and server.speculation == "off"
        ],
    )


def _best_ratio(
    report: PeerReport, claim: str, ours: Server, rivals: Sequence[Server], cell: Cell
) -> Ratio | None:
    """None where either side has no number."""
    mine = rates(report, ours.name, cell)
    others = {server.name: rates(report, server.name, cell) for server in rivals}
    others = {name: by_round for name, by_round in others.items() if by_round}
    if not mine or not others:
        return None
    best = max(others, key=lambda name: median(others[name].values()))
    shared = sorted(mine.keys() & others[best].keys())
    per_round = tuple(mine[idx] / others[best][idx] for idx in shared if others[best][idx] > 0)
    if not per_round:
        return None
    return Ratio(
        claim=claim,
        cell=cell.label,
        ours=ours.name,
        other=best,
        ours_rate=median(mine.values()),
        other_rate=median(others[best].values()),
        ratio=median(per_round),
        per_round=per_round,
    )


def to_json(report: PeerReport) -> bytes:
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def from_json(data: bytes) -> PeerReport:
    """Raises msgspec.DecodeError for another schema."""
    return msgspec.json.decode(data, type=PeerReport)


def render(report: PeerReport) -> str:
    parts = [
        f"{report.environment.cpu_model}, {report.environment.num_cores} cores "
        f"({', '.join(report.environment.cpu_flags)}), {report.settings.rounds} rounds",
        *(f"left out: {name}: {reason}" for name, reason in report.left_out.items()),
        "\nTOKENS PER SECOND (median of rounds)\n" + _rate_table(report),
        "\nLATENCY (ms, median of rounds) AND MEMORY\n" + _latency_table(report),
        "\nRATIOS (ours / theirs, median of the rounds' ratios [lowest, highest])\n"
        + _ratio_table(report),
    ]
    warnings = list(_warnings(report))
    if warnings:
        parts.append("\nDISTURBED\n" + "\n".join(warnings))
    return "\n".join(parts)


def _rate_table(report: PeerReport) -> str:
    cells = cells_of(report)
    rows = [["server", *(cell.label for cell in cells)]]
    for server in report.servers:
        row = [server.name]
        for cell in cells:
            values = rates(report, server.name, cell).values()
            row.append(f"{median(values):.1f}" if values else "-")
        rows.append(row)
    return _columns(rows)


def _latency_table(report: PeerReport) -> str:
    chat = [cell for cell in cells_of(report) if cell.workload == "chat"]
    ends = chat[:1] + chat[1:][-1:]
    rows = [["server"]]
    for cell in ends:
        rows[0] += [f"TTFT c{cell.concurrency}", "ITL p50", "ITL p99"]
    rows[0] += ["RSS MB", "peak MB", "start s"]
    for server in report.servers:
        row = [server.name]
        for cell in ends:
            row += [
                _median_ms(report, server.name, cell, lambda one: one.ttft_p50),
                _median_ms(report, server.name, cell, lambda one: one.itl_p50),
                _median_ms(report, server.name, cell, lambda one: one.itl_p99),
            ]
        turns = [turn for turn in report.turns if turn.server == server.name]
        memories = [turn.memory for turn in turns if turn.memory is not None]
        starts = [turn.start_seconds for turn in turns if turn.start_seconds is not None]
        row += [
            f"{median(memory.resident for memory in memories) / 1e6:.0f}" if memories else "-",
            f"{median(memory.peak for memory in memories) / 1e6:.0f}" if memories else "-",
            f"{median(starts):.1f}" if starts else "-",
        ]
        rows.append(row)
    return _columns(rows)


def _median_ms(
    report: PeerReport, server: str, cell: Cell, value: Callable[[Measured], float | None]
) -> str:
    found = [
        seconds
        for one in report.measured
        if one.server == server and one.cell == cell and (seconds := value(one)) is not None
    ]
    return f"{median(found) * 1e3:.1f}" if found else "-"


def _ratio_table(report: PeerReport) -> str:
    if not report.ratios:
        return "none: ours and a peer must both have been measured"
    rows = [["ours", "against", "which is", "cell", "ours", "theirs", "ratio", "range"]]
    rows += [
        [
            ratio.ours,
            ratio.claim,
            ratio.other,
            ratio.cell,
            f"{ratio.ours_rate:.1f}",
            f"{ratio.other_rate:.1f}",
            f"{ratio.ratio:.2f}",
            f"[{min(ratio.per_round):.2f}, {max(ratio.per_round):.2f}]",
        ]
        for ratio in report.ratios
    ]
    return _columns(rows)


def _warnings(report: PeerReport) -> Iterable[str]:
    for turn in report.turns:
        where = f"round {turn.round_idx + 1}, {turn.server}"
        if turn.error is not None:
            yield f"{where}: {turn.error}"
        if turn.busy_cores_before > NOISY_CORES:
            yield f"{where}: other processes kept {turn.busy_cores_before:.1f} cores busy before it"
    for one in report.measured:
        where = f"round {one.round_idx + 1}, {one.server}, {one.cell.label}"
        if one.num_failed:
            yield f"{where}: {one.num_failed} of {one.num_requests} failed, first {one.failure}"
        if one.num_cached_tokens:
            yield f"{where}: {one.num_cached_tokens} prompt tokens came from a prefix cache"
        if one.num_repeated_prompts:
            yield f"{where}: {one.num_repeated_prompts} prompts had been sent to it before"


def _columns(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width; numbers to the right, words to the left."""
    widths = [max(len(row[idx]) for row in rows) for idx in range(len(rows[0]))]
    lines = []
    for row in rows:
        fields = [
            text.rjust(width) if text[:1] in "-0123456789[" else text.ljust(width)
            for text, width in zip(row, widths, strict=True)
        ]
        lines.append("  ".join(fields).rstrip())
    return "\n".join(lines)
