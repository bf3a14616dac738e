"""Words for servers of `loadgen peers` tests."""

from __future__ import annotations

import sys
from pathlib import Path

from specserve_loadgen.peers_servers import Precision, Server, Speculation

PEER_SERVER = Path(__file__).with_name("peer_server.py")


def a_server(
    name: str,
    *arguments: str,
    peer: str = "specserve",
    precision: Precision = "int8",
    speculation: Speculation = "off",
) -> Server:
    return Server(
        name=name,
        peer=peer,
        version="0",
        precision=precision,
        speculation=speculation,
        argv=(sys.executable, str(PEER_SERVER), "--port", "{port}", *arguments),
    )
