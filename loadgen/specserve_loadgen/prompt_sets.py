"""The prompts of a run: from its file or made by chance, with the limits that it wants."""

from __future__ import annotations

from specserve_loadgen.prompt import Prompt
from specserve_loadgen.prompts import load_prompts
from specserve_loadgen.settings import Settings
from specserve_loadgen.synthetic import synthetic_prompts, with_output_lengths

NUM_SYNTHETIC = 1000  # of a run bounded by its duration alone: few are sent twice


def prompts_for(settings: Settings) -> list[Prompt]:
    """Raises LoadgenError for a file or a description that cannot be read."""
    if settings.synthetic is not None:
        count = settings.num_requests or NUM_SYNTHETIC
        prompts = synthetic_prompts(settings.synthetic, count, settings.seed)
    else:
        prompts = load_prompts(settings.prompts_file, settings.categories)
    if settings.output_tokens is None:
        return prompts
    return with_output_lengths(prompts, settings.output_tokens, settings.seed)
