"""The command line: `specserve serve | generate | pull | bench | loadgen | study | report | trace`.

Heavy imports wait until a command needs them, so that --help answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TypeVar

import msgspec

from specserve.errors import SpecserveError
from specserve.options import EngineOptions, ServeOptions, add_option_arguments
from specserve.spinning import spin_briefly
from specserve.version import __version__

S = TypeVar("S", bound=msgspec.Struct)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specserve",
        description="A streaming LLM server built around speculative decoding.",
    )
    parser.add_argument("--version", action="version", version=f"specserve {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over HTTP (OpenAI's API)")
    add_option_arguments(serve, ServeOptions)
    serve.set_defaults(run=_serve)

    generate = commands.add_parser("generate", help="complete one prompt here, without a server")
    generate.add_argument("prompt")
    generate.add_argument("--max-tokens", type=int, default=64)
    generate.add_argument("--temperature", type=float, default=0.0)
    generate.add_argument("--seed", type=int, default=None)
    generate.add_argument("--chat", action="store_true", help="through the model's chat template")
    add_option_arguments(generate, EngineOptions)
    generate.set_defaults(run=_generate)

    pull = commands.add_parser("pull", help="fetch a model into the cache: `specserve pull demo`")
    pull.add_argument("model")
    pull.set_defaults(run=_pull)

    commands.add_parser(
        "bench", help="measure in one process: `bench step`, `bench ceilings`, `bench perplexity`"
    )
    commands.add_parser("draft", help="`draft train`, `draft eval`: drafts for a target of yours")
    commands.add_parser("loadgen", help="load a server and measure it (see loadgen --help)")
    commands.add_parser("study", help="experiments on a running server (see study --help)")
    commands.add_parser(
        "report", help="`report A.json`: tables, page; `report A.json B.json`: compare"
    )
    commands.add_parser("trace", help="read traces: `trace FILE`, `trace serve`, `trace export`")
    return parser


def build_bench_parser() -> argparse.ArgumentParser:
    from specserve import perplexity
    from specserve.bench import ceilings, step

    parser = argparse.ArgumentParser(prog="specserve")
    kinds = (
        parser.add_subparsers(required=True)
        .add_parser("bench")
        .add_subparsers(dest="kind", required=True, metavar="step | ceilings | perplexity")
    )
    for name, module, text in (
        ("step", step, "where the time of a decode step goes, against the floor of its products"),
        ("ceilings", ceilings, "speculation at given acceptance, against its own cost table"),
        ("perplexity", perplexity, "what a dtype costs in quality, measured on a text"),
    ):
        bench = kinds.add_parser(name, help=text, description=text)
        module.add_arguments(bench)
        bench.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    # These have command lines of their own and import nothing of the engine.
    if arguments[:1] == ["loadgen"]:
        from specserve_loadgen.cli import main as loadgen_main

        return loadgen_main(arguments[1:])
    if arguments[:2] == ["study", "regret"]:
        from specserve.hindsight_report import main as regret_main

        return regret_main(arguments[2:])
    if arguments[:2] == ["study", "whatif"]:
        from specserve.whatif import main as whatif_main

        return whatif_main(arguments[2:])
    if arguments[:1] == ["report"]:
        from specserve_loadgen.reports.command import main as report_main

        return report_main(arguments[1:])
    if arguments[:1] == ["study"]:
        from specserve_loadgen.study import main as study_main

        return study_main(arguments[1:])
    if arguments[:1] == ["trace"]:
        from specserve_observability.trace_command import main as trace_main

        return trace_main(arguments[1:])
    spin_briefly()
    options = _parser_for(arguments).parse_args(
        arguments[1:] if arguments[:1] == ["draft"] else arguments
    )
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except SpecserveError as error:
        print(f"specserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser_for(arguments: list[str]) -> argparse.ArgumentParser:
    """Some options are beside what they belong to, which imports torch."""
    if arguments[:1] == ["bench"]:
        return build_bench_parser()
    if arguments[:1] == ["draft"]:
        from specserve.training.command import build_parser as build_draft_parser

        return build_draft_parser()
    return build_parser()


def _options(kind: type[S], namespace: argparse.Namespace) -> S:
    names = kind.__struct_fields__
    return msgspec.convert({name: getattr(namespace, name) for name in names}, kind)


def _serve(namespace: argparse.Namespace) -> int:
    # Seconds where PyTorch's files are in memory, a minute and more where they come from disk.
    print("starting: loading PyTorch", file=sys.stderr, flush=True)
    from specserve.serve import serve

    return serve(_options(ServeOptions, namespace))


def _pull(namespace: argparse.Namespace) -> int:
    from specserve.weights import resolve_model

    print(resolve_model(namespace.model, lambda line: print(line, file=sys.stderr)))
    return 0


def _generate(namespace: argparse.Namespace) -> int:
    from specserve.llm import LLM
    from specserve.types import SamplingParams

    params = SamplingParams(
        max_tokens=namespace.max_tokens, temperature=namespace.temperature, seed=namespace.seed
    )
    options = msgspec.structs.asdict(_options(EngineOptions, namespace))
    with LLM(**options) as llm:
        if namespace.chat:
            result = llm.chat([{"role": "user", "content": namespace.prompt}], params)
        else:
            result = llm.generate(namespace.prompt, params)
    output = result[0].outputs[0]
    print(output.text)
    stats = output.speculation
    if stats is not None and stats.num_steps:
        print(
            f"[{len(output.token_ids)} tokens in {stats.num_steps} target steps: "
            f"{stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} guesses accepted]",
            file=sys.stderr,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
