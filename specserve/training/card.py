"""The training card: what a draft was made of, beside its weights, for people and for programs."""

from __future__ import annotations

from pathlib import Path

import msgspec

from specserve.training.heldout import HeldOut


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """num_tokens: of answers, distinct; num_places: learned from, repetitions counted.

    coverage: share of held-out answers' tokens that the draft can say
    held_out: (steps done, what was measured), oldest first
    """

    kind: str
    model: str
    data: str
    num_prompts: int
    num_answers: int
    num_tokens: int
    num_held_out: int
    num_places: int
    num_steps: int
    num_epochs: int
    training_seconds: float
    loss_kind: str
    last_loss: float
    temperatures: tuple[float, ...]
    loss_temperature: float
    target_dtype: str
    num_params: int
    draft_vocab_size: int
    coverage: float
    form: str
    num_bytes: int
    held_out: tuple[tuple[int, HeldOut], ...]
    command: str
    versions: dict[str, str]


def write_card(card: Card, directory: Path) -> None:
    """card.json and CARD.md"""
    document = msgspec.json.format(msgspec.json.encode(card), indent=2)
    (directory / "card.json").write_bytes(document + b"\n")
    (directory / "CARD.md").write_text(render(card), encoding="utf-8")


def render(card: Card) -> str:
    facts = [
        ("target", f"{card.model}, {card.target_dtype}"),
        ("prompts", f"{card.data} ({card.num_prompts:,})"),
        (
            "answers",
            f"{card.num_answers:,} with {card.num_tokens:,} tokens, the target's own, at "
            f"temperatures {', '.join(f'{t:g}' for t in card.temperatures)}; "
            f"{card.num_held_out:,} answers held out, by prompt",
        ),
        (
            "training",
            f"{card.num_steps:,} steps, {card.num_places:,} places "
            f"({card.num_epochs} epochs begun), {card.training_seconds / 60:.1f} minutes",
        ),
        (
            "loss",
            f"{card.loss_kind} at temperature {card.loss_temperature:g}, last {card.last_loss:.4f}",
        ),
        (
            "size",
            f"{card.num_params:,} parameters, {card.num_bytes / 1e6:.1f} MB as {card.form}",
        ),
        (
            "draft vocabulary",
            f"{card.draft_vocab_size:,} tokens, which cover {card.coverage:.2%} of held-out "
            "answers",
        ),
        ("command", f"`{card.command}`"),
        ("versions", ", ".join(f"{name} {value}" for name, value in card.versions.items())),
    ]
    lines = [f"# A draft of kind `{card.kind}` for {card.model}", ""]
    lines += [f"- **{name}**: {text}" for name, text in facts]
    lines += [
        "",
        "## Held-out texts",
        "",
        "Greedy: share of guesses that are right where all before them are, by position in the "
        "draft, and tokens per step with as many guesses. Overlap: what the best coupling accepts "
        f"at temperature {card.loss_temperature:g}.",
        "",
        "| steps | tokens per step | accepted by position | overlap by position |",
        "|---|---|---|---|",
    ]
    for step, found in card.held_out:
        lines.append(
            f"| {step} | {found.tokens_per_step:.3f} | {_row(found.accepted)} | "
            f"{_row(found.overlap)} |"
        )
    return "\n".join(lines) + "\n"


def _row(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:.3f}" for value in values)
