"""`specserve trace`: what can be done with a trace file. Imports nothing that it does not need."""

from __future__ import annotations

import sys
from collections.abc import Sequence

USAGE = """usage: specserve trace FILE            the slowest requests and where their time went
       specserve trace serve FILE...   a viewer in the browser, with Jaeger's query API
       specserve trace export FILE -o OUT   what Jaeger's UI opens by upload
each of them takes --help"""


def main(argv: Sequence[str]) -> int:
    """Without the word `trace`. Returns the exit status."""
    first, rest = (argv[0], argv[1:]) if argv else ("", [])
    if first == "export":
        from .jaeger import export_main

        return export_main(rest)
    if first == "serve":
        from .trace_viewer import serve_main

        return serve_main(rest)
    if first in ("", "-h", "--help"):
        print(USAGE, file=sys.stdout if first else sys.stderr)
        return 0 if first else 2
    from .trace_summary import summary_main

    return summary_main(rest if first == "summary" else argv)
