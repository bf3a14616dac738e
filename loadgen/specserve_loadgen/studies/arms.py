"""What a study compares, as text and as request options: off, auto, suffix:3, eagle3:5@block."""

from __future__ import annotations

import msgspec

from specserve_loadgen.errors import LoadgenError

RULES = ("replay", "block", "rejection", "typical")


class Arm(msgspec.Struct, frozen=True):
    """drafter None, K None, rule None: nothing is asked for, the server does what it does."""

    name: str
    drafter: str | None = None
    max_draft_tokens: int | None = None
    verify: str | None = None


OFF = Arm("off", "none", 0)
UNASKED = Arm("unasked")  # for servers that know no such options


def parse_arm(flag: str, text: str) -> Arm:
    """`off`, `auto`, `unasked`, or DRAFTER:K, each with @RULE behind it if another is wanted."""
    choice, at, rule = text.partition("@")
    if at and rule not in RULES:
        raise LoadgenError(f"{flag} {text}: no rule {rule!r}; they are {', '.join(RULES)}")
    verify = rule or None
    if choice == "off":
        return Arm(text, OFF.drafter, OFF.max_draft_tokens, verify)
    if choice == "auto":
        return Arm(text, "auto", None, verify)
    if choice == "unasked":
        return Arm(text, None, None, verify)
    drafter, _, number = choice.partition(":")
    if not drafter or not number.isdigit() or int(number) < 1:
        raise LoadgenError(
            f"{flag} {text}: write off, auto, unasked or DRAFTER:K with K of at least 1, "
            "as in suffix:3 or suffix:3@block"
        )
    return Arm(text, drafter, int(number), verify)


def parse_arms(flag: str, text: str) -> tuple[Arm, ...]:
    arms = tuple(parse_arm(flag, part) for part in text.split(",") if part)
    if len({arm.name for arm in arms}) != len(arms):
        raise LoadgenError(f"{flag} {text}: the same choice twice")
    return arms
