"""What a reply must look like that has to be a call: the model's own format, as a grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq

import msgspec

from specserve.constraint import GrammarSpec
from specserve.errors import RequestError
from specserve.server.call_reader import CallFormat
from specserve.server.wire import FunctionBody

# Some models put out white space for ever wherever it is allowed.
_OPTIONS = {"whitespace_pattern": r"[ \n\t]{1,20}"}


def call_grammar(layout: CallFormat, functions: Seq[FunctionBody], *, several: bool) -> GrammarSpec:
    """One call of one of the functions, or `several`: as many as the model likes, one at least.

    RequestError where a function's parameters are nested too deeply; what else is wrong with them
    is found when the grammar is compiled.
    """
    call = f"{_quoted(layout.before)} call {_quoted(layout.after)}"
    more = f" ({_quoted(layout.between)} {call})*" if several else ""
    rules = [f"start: {call}{more}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(functions))))
    for i, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function.name)}, "{layout.arguments}": '
        rules.append(f'call_{i}: {_quoted(head)} arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {_schema(function, f'tools[{i}]')}")
    return GrammarSpec(kind="lark", text="\n".join(rules), param="tools")


def _quoted(text: str) -> str:
    """ "" is no terminal, but an empty rule: left out, it means the same."""
    return json.dumps(text) if text else ""


def _schema(function: FunctionBody, where: str) -> str:
    # An object, whatever else is said of it: that is what a call's arguments are.
    schema = {**(function.parameters or {}), "type": "object", "x-guidance": _OPTIONS}
    try:
        return msgspec.json.encode(schema).decode()
    except RecursionError:
        raise RequestError(
            f"{where}.function.parameters are nested too deeply",
            param=f"{where}.function.parameters",
        ) from None
