"""Prompts that the target asks itself: what it says where its chat template has a person speak.

Magpie (Xu et al. 2024, arXiv 2406.08464). An instruction-tuned model has learned what it is asked,
too; its own questions are as varied as what it was tuned on, which words and templates of ours are
not. Those it does not end itself, empty ones and repetitions are left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from specserve.chat_template import render_chat
from specserve.errors import ModelError
from specserve.tokenizer import Tokenizer
from specserve.types import SamplingParams

LONGEST = 160  # tokens of a prompt
_ROUND = 128
_MOST_TRIES = 20  # of those asked for, before the model is given up


class Said(NamedTuple):
    text: str
    has_ended: bool  # by itself


# (prompts as ids, one SamplingParams each) -> what the target said
Ask = Callable[[Seq[Seq[int]], Seq[SamplingParams]], Seq[Said]]


def self_prompts(
    tokenizer: Tokenizer,
    ask: Ask,
    count: int,
    *,
    seed: int,
    progress: Callable[[int], None] = lambda _: None,
) -> list[str]:
    """`count` different prompts, a function of the arguments. progress: called with what is new.

    ModelError where the target hardly ever ends a turn that it began as a person; RequestError
    where it has no chat template.
    """
    begin = render_chat(
        tokenizer,
        [{"role": "user", "content": ""}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    found: dict[str, None] = {}
    tries = 0
    while len(found) < count:
        if tries > _MOST_TRIES * count + _ROUND:
            raise ModelError(
                f"of {tries} prompts that the target began only {len(found)} were ended by it and "
                f"new: make fewer than {count}, or take prompts from a file"
            )
        params = [_params(seed, tries + idx) for idx in range(_ROUND)]
        said = ask([begin] * _ROUND, params)
        tries += _ROUND
        before = len(found)
        for one in said:
            if one.has_ended and one.text.strip() and len(found) < count:
                found.setdefault(one.text.strip())
        progress(len(found) - before)
    return list(found)


def _params(seed: int, number: int) -> SamplingParams:
    own_seed = random.Random(f"{seed}/self/{number}").getrandbits(62)
    return SamplingParams(temperature=1.0, top_p=0.98, max_tokens=LONGEST, seed=own_seed)
