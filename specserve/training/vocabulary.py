"""The draft's vocabulary: the tokens the target itself says most often.

Kept in the public form: `d2t` holds offsets (target id = entry + d2t[entry]), ids ascending.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor


def most_frequent(
    answers: Iterable[Seq[int]], num_entries: int, vocab_size: int, always: Iterable[int] = ()
) -> Tensor:
    """[num_entries] int64 target ids, ascending. Ties, and what was never said, by lower id.

    always: ids that are in whatever their count, as EOS
    """
    counts = Counter(token_id for answer in answers for token_id in answer)
    forced = set(always)
    order = sorted(range(vocab_size), key=lambda i: (i not in forced, -counts[i], i))
    return torch.tensor(sorted(order[:num_entries]), dtype=torch.int64)


def coverage(answers: Iterable[Seq[int]], target_ids: Tensor) -> float:
    """Share of the answers' tokens that the draft can say."""
    known = set(target_ids.tolist())
    said = [token_id in known for answer in answers for token_id in answer]
    return sum(said) / max(1, len(said))


def offsets(target_ids: Tensor) -> Tensor:
    """d2t [W] int64"""
    return target_ids - torch.arange(len(target_ids))


def known_flags(target_ids: Tensor, vocab_size: int) -> Tensor:
    """t2d [V] bool"""
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, target_ids, True)
