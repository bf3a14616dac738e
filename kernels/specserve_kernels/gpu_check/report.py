"""What a check of the kernels on a GPU found: values, a table, JSON, and what misses its goal.

Pure Python. Speeds are compared with what the same run measured: a copy's bytes per second, one
plain read of the logits, a step without guesses. Times are medians.
"""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass

ACCEPTANCE = 0.8  # the synthetic acceptance rate, per guess and independent


@dataclass(frozen=True)
class Correct:
    """worst: of all batches the largest relative error, or how many tokens or bits differ."""

    kernel: str
    case: str
    num_batches: int
    worst: float
    limit: float

    @property
    def ok(self) -> bool:
        return self.worst <= self.limit  # False for NaN


@dataclass(frozen=True)
class Speed:
    """One launch or a few. num_bytes: what must be read and written at least.

    peer: what else was measured on the same data, if anything, and its time
    share_wanted: the least share of the copy's bytes per second; 0: no goal
    most_of_peer: the largest multiple of the peer's time; 0: no goal
    """

    kernel: str
    case: str
    microseconds: float
    num_bytes: int
    peer: str = ""
    peer_microseconds: float = 0.0
    share_wanted: float = 0.0
    most_of_peer: float = 0.0

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.microseconds / 1e3

    @property
    def of_peer(self) -> float:
        return self.microseconds / self.peer_microseconds if self.peer else 0.0


@dataclass(frozen=True)
class Step:
    """A whole step of random weights: K draft forwards, one target forward over K + 1 rows of each
    sequence, sampling and verification.

    floor_microseconds: of streaming all weights that the step reads, and its KV, once
    """

    pair: str
    batch_size: int
    num_guesses: int
    microseconds: float
    floor_microseconds: float
    floor_share_wanted: float = 0.0

    @property
    def floor_share(self) -> float:
        return self.floor_microseconds / self.microseconds

    @property
    def tokens(self) -> float:
        """Expected per sequence and step, the extra token included, at ACCEPTANCE."""
        return sum(ACCEPTANCE**idx for idx in range(self.num_guesses + 1))

    @property
    def tokens_per_s(self) -> float:
        return self.batch_size * self.tokens / self.microseconds * 1e6


@dataclass(frozen=True)
class Report:
    """skipped: parts that there was no time for; failures: parts that raised an error."""

    device: str
    versions: dict[str, str]
    command: str
    copy_gb_per_s: float = 0.0
    seconds: float = 0.0
    correct: Seq[Correct] = ()
    speeds: Seq[Speed] = ()
    steps: Seq[Step] = ()
    skipped: Seq[str] = ()
    failures: Seq[str] = ()

    def share_of_copy(self, speed: Speed) -> float:
        return speed.gb_per_s / self.copy_gb_per_s


def as_json(report: Report) -> str:
    """All fields, and the numbers derived from them."""
    fields = asdict(report)
    fields["problems"] = problems(report)
    for entry, speed in zip(fields["speeds"], report.speeds, strict=True):
        entry |= {"gb_per_s": speed.gb_per_s, "share_of_copy": report.share_of_copy(speed)}
        entry["of_peer"] = speed.of_peer
    for entry, step in zip(fields["steps"], report.steps, strict=True):
        entry |= {"tokens": step.tokens, "tokens_per_s": step.tokens_per_s}
        entry["floor_share"] = step.floor_share
    return json.dumps(fields, indent=1)


def problems(report: Report) -> list[str]:
    """A sentence for everything that is wrong or misses its goal."""
    found = list(report.failures)
    found += [
        f"{c.kernel} ({c.case}) is wrong: {c.worst:g}, at most {c.limit:g}"
        for c in report.correct
        if not c.ok
    ]
    for s in report.speeds:
        share = report.share_of_copy(s)
        if share < s.share_wanted:
            found.append(
                f"{s.kernel} ({s.case}) reaches {share:.0%} of the copy, "
                f"{s.share_wanted:.0%} wanted"
            )
        if s.most_of_peer and s.of_peer > s.most_of_peer:
            found.append(
                f"{s.kernel} ({s.case}) takes {s.of_peer:.2f} x {s.peer}, "
                f"{s.most_of_peer:.2f} x allowed"
            )
    found += [
        f"{s.pair}, batch {s.batch_size}, K {s.num_guesses}: {s.floor_share:.0%} of the floor, "
        f"{s.floor_share_wanted:.0%} wanted"
        for s in report.steps
        if s.floor_share < s.floor_share_wanted
    ]
    return found


def table(report: Report) -> str:
    """Markdown: what ran where, then a table per part, then what misses its goal."""
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    lines = [f"{report.device}; {versions}; {report.seconds:.0f} s; `{report.command}`", ""]
    if report.correct:
        lines += ["| kernel | case | batches | worst | limit |", "|---|---|---|---|---|"]
        lines += [
            f"| {c.kernel} | {c.case} | {c.num_batches} | {c.worst:.2g} | {c.limit:g} |"
            for c in report.correct
        ]
    if report.speeds:
        lines += ["", f"A copy moves {report.copy_gb_per_s:.0f} GB/s (bytes read and written).", ""]
        lines += [
            "| kernel | case | us | GB/s | of the copy | against |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_speed_line(report, speed) for speed in report.speeds]
    if report.steps:
        lines += ["", f"Tokens at a synthetic acceptance of {ACCEPTANCE}.", ""]
        lines += [
            "| pair | batch | K | us | of the floor | tokens/s |",
            "|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {s.pair} | {s.batch_size} | {s.num_guesses} | {s.microseconds:.0f} "
            f"| {s.floor_share:.0%} | {s.tokens_per_s:.0f} |"
            for s in report.steps
        ]
    lines += ["", *(f"skipped: {reason}" for reason in report.skipped), *problems(report)]
    return "\n".join(lines).rstrip()


def _speed_line(report: Report, s: Speed) -> str:
    peer = f"{s.of_peer:.2f} x {s.peer}" if s.peer else ""
    return (
        f"| {s.kernel} | {s.case} | {s.microseconds:.1f} | {s.gb_per_s:.0f} "
        f"| {report.share_of_copy(s):.0%} | {peer} |"
    )
