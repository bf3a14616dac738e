"""A load generator for streaming LLM servers that measures what speculation buys.

Speaks HTTP only and imports nothing of the server's, so it measures any OpenAI-compatible server:

    settings  what is asked for          prompts   files and the shipped pack
    pacing    when requests leave        client    one request, its chunks and their times
    run       preflight, warm-up, load   latency, acceptance, crosscheck   numbers from records
    report    one schema-versioned value, rendered as a table or as JSON

Every number is computed from `records.RequestRecord`s after the run, never while it runs: a new
measure or study needs no change in the client. Times are seconds on the run's clock.
"""

from specserve_loadgen.cli import main

__all__ = ["main"]
