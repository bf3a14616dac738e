"""What reading 100 kB of hostile text costs, in ms: `python -m tests.call_reader_cost`.

The reader and its readable form, the text in one piece and in pieces of 16 characters.
"""

from __future__ import annotations

import time
from statistics import median

from specserve.server.call_reader import CALL_FORMATS, CallReader
from specserve.server.parts import Reader
from specserve.server.thinking import ThinkReader
from tests.plain_call_reader import PlainCallReader

LENGTH = 100_000
LIST = '<tool_call>{"name": "add", "arguments": {"x": ['
HOSTILE = {
    "marks": "<tool_call>",
    "marks and braces": "<tool_call>{",
    "half a name": '<tool_call>{"name": "ad',
    "keys without a name": '<tool_call>{"a":"x',
    "calls": '<tool_call>{"name": "add"}</tool_call>',
    "calls without end tags": ('<tool_call>', '{"name":"add"}'),
    "keys of one call": ("<tool_call>{", "".join(f'"k{i}":0,' for i in range(LENGTH // 9))),
    "brackets, then no call": '<tool_call>{"x":' + "[" * 60,
    "empty lists": (LIST, "[],"),
    "deep lists": (LIST, "[" * 50 + "]" * 50 + ","),
    "digits": (LIST, "0,"),
    "empty strings": (LIST, '"",'),
    "empty objects": (LIST, '{"":{}},'),
    "escapes": (LIST + '"', "\\n"),
    "line breaks": (LIST + '"', "\n"),
    "strings of line breaks": (LIST, '"\n",'),
    "white space": " ",
    "half a mark of reasoning": ("<think>", "</think"),
}  # fmt: skip


def text_of(name: str) -> str:
    given = HOSTILE[name]
    head, repeated = given if isinstance(given, tuple) else ("", given)
    return head + repeated * max(1, LENGTH // len(repeated))


def milliseconds(name: str, make: type[CallReader] | type[PlainCallReader], size: int) -> float:
    text = text_of(name)
    reader: Reader = make(CALL_FORMATS["hermes"], ("add",))
    if "reasoning" in name:
        reader = ThinkReader(reader, opened=True)
    begun = time.perf_counter()
    for at in range(0, len(text), size):
        reader.push(text[at : at + size])
    reader.finish()
    return 1e3 * (time.perf_counter() - begun)


def main() -> None:
    print(f"{'':26} {'whole':>8} {'readable':>8} {'by 16':>8} {'readable':>8}")
    for name in HOSTILE:
        row = [
            median(milliseconds(name, make, size) for _ in range(3))
            for size in (2 * LENGTH, 16)
            for make in (CallReader, PlainCallReader)
        ]
        print(f"{name:26}", *(f"{value:8.1f}" for value in row))


if __name__ == "__main__":
    main()
