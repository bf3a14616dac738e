"""`specserve draft train | eval | prompts`: the command line."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence as Seq
from pathlib import Path

import msgspec

from specserve.options import add_option_arguments
from specserve.tokenizer import Tokenizer
from specserve.training import evaluate
from specserve.training.prompts import generated_prompts
from specserve.training.self_prompts import Said, self_prompts
from specserve.training.settings import TrainOptions
from specserve.types import SamplingParams


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specserve draft")
    commands = parser.add_subparsers(required=True, metavar="train | eval | prompts")
    train = commands.add_parser("train", help="teach a draft on the target's own answers")
    add_option_arguments(train, TrainOptions)
    train.set_defaults(run=_train)
    judge = commands.add_parser("eval", help="measure a draft in the engine, on any prompts")
    evaluate.add_arguments(judge)
    judge.set_defaults(run=evaluate.run)
    prompts = commands.add_parser(
        "prompts", help="write prompts: the target's own, or made from the shipped words"
    )
    prompts.add_argument(
        "--model", help="the target, which asks itself; without: prompts from the shipped words"
    )
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
    if namespace.model is None:
        made = generated_prompts(namespace.count, namespace.seed)
    else:
        made = _of_target(namespace.model, namespace.count, namespace.seed)
    lines = [
        json.dumps({"id": idx, "category": category, "prompt": text}, ensure_ascii=False)
        for idx, (category, text) in enumerate(made)
    ]
    Path(namespace.out).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts in {namespace.out}")
    return 0


def _of_target(model: str, count: int, seed: int) -> list[tuple[str, str]]:
    from tqdm import tqdm

    from specserve.llm import LLM

    with (
        LLM(model, drafters="none", speculation="off", max_num_seqs=64) as llm,
        tqdm(total=count, unit="prompt", desc="prompts") as bar,
    ):

        def ask(prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Said]:
            results = llm.generate([list(ids) for ids in prompts], list(params))
            ends = [result.outputs[0] for result in results]
            return [Said(end.text, end.finish_reason == "stop") for end in ends]

        tokenizer = Tokenizer.load(llm.model_path)
        return self_prompts(tokenizer, ask, count, seed=seed, progress=bar.update)
