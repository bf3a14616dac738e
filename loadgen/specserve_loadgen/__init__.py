"""A load generator for streaming LLM servers that measures what speculation buys.

Speaks HTTP only and imports nothing of the server's, so it measures any OpenAI-compatible server:

    options, settings   what is asked for
    prompts, traces, synthetic, prompt_sets    what is sent: files, recorded traffic, random text
    arrivals, pacing, conversation             when it is sent, and what follows a reply
    client, reply       one request, its chunks and their times
    run                 preflight, warm-up, load
    latency, goodput, acceptance, crosscheck   numbers from records
    report              one schema-versioned value, rendered as a table or as JSON

Every number is computed from `records.RequestRecord`s after the run, never while it runs: a new
measure or study needs no change in the client. Times are seconds on the run's clock.
"""

from specserve_loadgen.cli import main

__all__ = ["main"]
