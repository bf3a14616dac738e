"""The side process of tracing: batches from stdin become spans and are delivered.

`python -m specserve_observability.exporter`, started by ExporterProcess and by nobody else. It ends
with the last batch, or with its stdin when the server died.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import BinaryIO

import msgspec

from .export import Batch
from .exporter_process import COUNTS, LENGTH, Hello
from .in_process import InProcessExporter
from .logs import configure_logging

_NICENESS = 5  # where cores are few, a step goes before its span
_GC_THRESHOLD = 50_000  # new objects: about 1,000 steps of 16 rows
_ORPHAN_SECONDS = 5.0  # for delivery, once the server is gone without a word


class Counts(msgspec.Struct):
    """SpanCounts of this process."""

    num_step_spans_sampled_out: int = 0
    num_spans_dropped_at_queue: int = 0
    num_spans_dropped_at_export: int = 0

    def tell(self, out: BinaryIO) -> None:
        numbers = (
            self.num_step_spans_sampled_out,
            self.num_spans_dropped_at_queue,
            self.num_spans_dropped_at_export,
        )
        try:
            out.write(COUNTS.pack(*numbers))
            out.flush()
        except OSError:  # the server is gone, nobody is left to be told
            pass


def messages(stream: BinaryIO) -> Iterator[bytes]:
    """Whole ones only: a server that was killed may leave half a message."""
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        (num_bytes,) = LENGTH.unpack(head)
        data = stream.read(num_bytes)
        if len(data) < num_bytes:
            return
        yield data


def main() -> int:
    # Signals to the whole group are for the server: it says here when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(_NICENESS)
    incoming = messages(sys.stdin.buffer)
    first = next(incoming, None)
    if first is None:
        return 0
    hello = msgspec.msgpack.decode(first, type=Hello)
    configure_logging(json=hello.settings.log_json, level=hello.settings.log_level)
    counts = Counts()
    exporter = InProcessExporter(
        hello.settings, counts, resource=hello.resource, version=hello.version
    )
    # Records and spans have no cycles: looking for some took a tenth of the time spent on them.
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    seconds_left = _serve(incoming, exporter, counts)
    exporter.close(time.monotonic() + seconds_left)
    counts.tell(sys.stdout.buffer)
    return 0


def _serve(incoming: Iterator[bytes], exporter: InProcessExporter, counts: Counts) -> float:
    """Handles every batch; how many seconds delivery has after the last."""
    decoder = msgspec.msgpack.Decoder(Batch)
    for data in incoming:
        began = time.monotonic()
        batch = decoder.decode(data)
        exporter.handle(batch)
        counts.tell(sys.stdout.buffer)
        if batch.seconds_left is not None:
            return max(0.0, batch.seconds_left - (time.monotonic() - began))
    exporter.handle(Batch([], [], [], time.time(), _ORPHAN_SECONDS))
    return _ORPHAN_SECONDS


if __name__ == "__main__":
    sys.exit(main())
