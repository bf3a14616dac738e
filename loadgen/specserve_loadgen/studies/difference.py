"""Whether two runs of the same prompts and seeds said the same, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import msgspec

from specserve_loadgen.records import Output, RequestRecord


class FirstDifference(msgspec.Struct, frozen=True):
    """one, other: the texts around it"""

    prompt_id: str
    token_idx: int
    one: str
    other: str


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """by: what was compared; a text's characters where a server does not tell token ids

    num_different: places at which they differ; all behind the shorter one's end count
    """

    by: str
    num_requests: int
    num_compared: int
    num_different: int
    num_different_requests: int
    first: FirstDifference | None


def compare(ones: Sequence[RequestRecord], others: Sequence[RequestRecord]) -> Difference:
    """Both in the order in which they were asked, one record for each prompt."""
    pairs = [
        (a, b, a.output, b.output)
        for a, b in zip(ones, others, strict=True)
        if a.output is not None and b.output is not None
    ]
    by_ids = all(x.token_ids is not None and y.token_ids is not None for _, _, x, y in pairs)
    compared = different = different_requests = 0
    first: FirstDifference | None = None
    for a, _, one, other in pairs:
        left, right = _units(one, by_ids), _units(other, by_ids)
        places = [
            at for at, (x, y) in enumerate(zip_longest(left, right, fillvalue=None)) if x != y
        ]
        compared += max(len(left), len(right))
        different += len(places)
        different_requests += bool(places)
        if places and first is None:
            first = FirstDifference(a.prompt_id, places[0], one.text[-80:], other.text[-80:])
    return Difference(
        by="tokens" if by_ids else "characters",
        num_requests=len(pairs),
        num_compared=compared,
        num_different=different,
        num_different_requests=different_requests,
        first=first,
    )


def _units(output: Output, by_ids: bool) -> Sequence[int | str]:
    return output.token_ids or () if by_ids else output.text
