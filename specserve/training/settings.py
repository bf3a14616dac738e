"""What a person can set for `specserve draft train`. One field, one flag, as in options.py."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from specserve.config import DType
from specserve.errors import ConfigError
from specserve.files import read_json
from specserve.training.state import has_state

LM_HEAD_SIZE = 32


def _help(text: str) -> Any:  # msgspec.Meta is what Annotated takes
    return msgspec.Meta(description=text)


class TrainOptions(msgspec.Struct, frozen=True, kw_only=True):
    kind: Annotated[
        Literal["eagle3", "lm"],
        _help("eagle3: a head that reads the target's states; lm: a tiny language model"),
    ] = "eagle3"
    model: Annotated[str, _help("the target, as for serve")] = "demo"
    data: Annotated[
        str,
        _help(
            "prompts: a file as loadgen reads them (JSONL, or a prompt a line), or generated:N for "
            "N made from the shipped words"
        ),
    ] = "generated:6000"
    out: Annotated[str, _help("directory of the run; the draft itself is written there, too")] = ""
    start_from: Annotated[
        str, _help("eagle3: a draft of the same shape, or demo: it learns on instead of anew")
    ] = ""
    tokens: Annotated[int, _help("tokens of the target's answers to learn from")] = 1_000_000
    steps: Annotated[int, _help("training steps; 0: as --minutes says")] = 0
    minutes: Annotated[float, _help("of training, generation not counted; 0: as --steps says")] = 0
    resume: Annotated[bool, _help("go on with the run in --out, with the flags it began with")] = (
        False
    )
    temperatures: Annotated[str, _help("of answers, by comma; prompts take turns")] = "0,0.7"
    max_answer: Annotated[int, _help("tokens of an answer")] = 256
    max_length: Annotated[
        int, _help("tokens of prompt and answer; longer prompts are left out")
    ] = 512
    round_size: Annotated[int, _help("answers per shard on disk")] = 256
    max_num_seqs: Annotated[int, _help("answers generated at a time")] = 64
    draft_vocab: Annotated[int, _help("eagle3: tokens that the draft can say")] = 8192
    depths: Annotated[int, _help("guesses in a row that it is taught")] = 5
    deep_every: Annotated[
        int, _help("eagle3: one place in so many is taught more than its first guess")
    ] = 1
    intermediate: Annotated[
        int, _help("width inside the MLP; 0: the target's (lm: 3 x hidden)")
    ] = 0
    hidden: Annotated[int, _help("lm: width; its embedding has one row per token")] = 128
    layers: Annotated[int, _help("lm: layers")] = 4
    rate: Annotated[float, _help("peak learning rate")] = 1e-3
    warmup_steps: Annotated[int, _help("steps until the peak")] = 50
    batch_tokens: Annotated[int, _help("tokens per step, prompts and padding counted")] = 4096
    loss: Annotated[
        Literal["lk", "kl", "overlap"],
        _help("lk: KL while far, overlap (what is accepted) when near; or one of the two alone"),
    ] = "lk"
    loss_temperature: Annotated[float, _help("of both laws in the loss")] = 0.7
    depth_decay: Annotated[float, _help("weight of a depth relative to the one before")] = 0.8
    teacher_top: Annotated[int, _help("tokens of the target's law that are kept per place")] = 64
    cache_gb: Annotated[float, _help("disk for the target's states, GB; 0: compute them anew")] = (
        4.0
    )
    held_out: Annotated[float, _help("share of prompts never learned from")] = 0.02
    judge_every: Annotated[int, _help("steps between looks at held-out texts")] = 100
    save_every: Annotated[int, _help("steps between checkpoints")] = 100
    export: Annotated[
        Literal["auto", "bf16", "int8"], _help("auto: bf16 up to 16 MB, else int8 (eagle3)")
    ] = "auto"
    seed: Annotated[int, _help("of everything random")] = 0
    dtype: Annotated[DType, _help("the target's, as for serve")] = "auto"
    backend: Annotated[str, _help("the target's kernels, as for serve")] = "auto"
    threads: Annotated[int, _help("threads for tensor work; 0: one per core")] = 0
    device: Annotated[str, _help("where the draft is trained: auto, cpu or cuda")] = "auto"


_MAY_CHANGE = (
    "resume", "out", "steps", "minutes", "threads", "cache_gb", "judge_every",
    "save_every", "export", "device",
)  # fmt: skip
_LEAST: dict[str, float] = {
    "tokens": 1, "steps": 0, "minutes": 0, "max_answer": 2, "max_length": 16, "round_size": 1,
    "max_num_seqs": 1, "draft_vocab": 1, "depths": 1, "deep_every": 1, "intermediate": 0,
    "hidden": 16, "layers": 1, "warmup_steps": 0, "batch_tokens": 1, "teacher_top": 1,
    "cache_gb": 0, "judge_every": 1, "save_every": 1, "threads": 0,
}  # fmt: skip


def check(options: TrainOptions) -> None:
    """ConfigError names the flag, its value and what it must be."""
    if not options.out:
        raise ConfigError("--out is missing: name a directory for the run")
    for name, least in _LEAST.items():
        value = getattr(options, name)  # the names are fields of TrainOptions
        if not least <= value < float("inf"):
            raise ConfigError(f"{_flag(name)} is {value}, it must be at least {least:g}")
    for name in ("rate", "loss_temperature", "depth_decay"):
        value = getattr(options, name)
        if not 0 < value < float("inf"):
            raise ConfigError(f"{_flag(name)} is {value}, it must be a number above 0")
    if not options.steps and not options.minutes:
        raise ConfigError("give --steps or --minutes: neither says when to stop")
    if not 0 < options.held_out < 1:
        raise ConfigError(f"--held-out is {options.held_out}, it must be between 0 and 1")
    if options.batch_tokens < options.max_length:
        raise ConfigError(
            f"--batch-tokens is {options.batch_tokens}, it must be at least --max-length "
            f"({options.max_length}): a text is never cut between batches"
        )
    if options.hidden % LM_HEAD_SIZE:
        raise ConfigError(
            f"--hidden is {options.hidden}, it must be a multiple of the head size {LM_HEAD_SIZE}"
        )
    if options.kind == "lm" and options.start_from:
        raise ConfigError(
            f"--start-from is {options.start_from!r}, it is for --kind eagle3: leave it out"
        )
    if options.kind == "lm" and options.export == "int8":
        raise ConfigError("--export int8 is for --kind eagle3: a draft model is read as bf16")
    if options.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device is {options.device!r}, it must be auto, cpu or cuda")
    parse_temperatures(options.temperatures)


def parse_temperatures(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= value <= 2 for value in found):
        raise ConfigError(
            f"--temperatures is {text!r}, it must be numbers from 0 to 2: for example 0,0.7"
        )
    return found


def begin(options: TrainOptions) -> Path:
    """The run's directory, its options written there; or those there compared with these.

    options: checked
    """
    directory = Path(options.out)
    path = directory / "training" / "run.json"
    before = read_json(path)
    if before and not options.resume:
        raise ConfigError(
            f"--out {options.out} holds a training run: give --resume to go on with it, or another "
            "--out"
        )
    if not before and options.resume:
        raise ConfigError(f"--resume: {options.out} holds no training run: leave the flag out")
    free = _MAY_CHANGE if has_state(directory / "training") else (*_MAY_CHANGE, "tokens")
    began = msgspec.structs.asdict(TrainOptions()) | before  # flags newer than the run: unset
    for name, value in msgspec.structs.asdict(options).items():
        if name not in free and before and began[name] != value:
            raise ConfigError(
                f"--resume: {_flag(name)} is {value!r} now and was {began[name]!r} when "
                "the run began: give the old value, or begin anew with another --out"
            )
    if not before:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = msgspec.json.encode(options)
        path.write_bytes(msgspec.json.format(document, indent=2) + b"\n")
    return directory


def without_folders(name: str) -> str:
    """The last part of a path that exists: a card tells nobody's folders."""
    return Path(name).name if name and Path(name).exists() else name


def command_of(options: TrainOptions) -> str:
    """What to type for these options, `without_folders`."""
    words = ["specserve", "draft", "train"]
    options = msgspec.structs.replace(
        options,
        out=without_folders(options.out),
        data=without_folders(options.data),
        model=without_folders(options.model),
        start_from=without_folders(options.start_from),
    )
    for field in msgspec.structs.fields(options):
        value = getattr(options, field.name)
        if value != field.default and field.name != "resume":
            words += [_flag(field.name), str(value)]
    return shlex.join(words)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
