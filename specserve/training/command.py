"""`specserve draft train | eval | prompts`: the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec

from specserve.options import add_option_arguments
from specserve.training import evaluate
from specserve.training.prompts import generated_prompts
from specserve.training.settings import TrainOptions


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specserve draft")
    commands = parser.add_subparsers(required=True, metavar="train | eval | prompts")
    train = commands.add_parser("train", help="teach a draft on the target's own answers")
    add_option_arguments(train, TrainOptions)
    train.set_defaults(run=_train)
    judge = commands.add_parser("eval", help="measure a draft in the engine, on any prompts")
    evaluate.add_arguments(judge)
    judge.set_defaults(run=evaluate.run)
    prompts = commands.add_parser("prompts", help="write prompts made from the shipped words")
    prompts.add_argument("--count", type=int, default=6000)
    prompts.add_argument("--seed", type=int, default=0)
    prompts.add_argument("--out", required=True, metavar="FILE.jsonl")
    prompts.set_defaults(run=_prompts)
    return parser


def _train(namespace: argparse.Namespace) -> int:
    from specserve.training.train import run_training

    names = TrainOptions.__struct_fields__
    options = msgspec.convert({name: getattr(namespace, name) for name in names}, TrainOptions)
    print(run_training(options))
    return 0


def _prompts(namespace: argparse.Namespace) -> int:
    lines = [
        json.dumps({"id": idx, "category": category, "prompt": text}, ensure_ascii=False)
        for idx, (category, text) in enumerate(generated_prompts(namespace.count, namespace.seed))
    ]
    Path(namespace.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts in {namespace.out}")
    return 0
