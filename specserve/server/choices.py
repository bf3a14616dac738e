"""What the streams of /v1/completions and /v1/chat/completions have in common."""

from __future__ import annotations

from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from specserve.errors import RequestError
from specserve.server.errors import ErrorReply, error_detail
from specserve.server.job import Job
from specserve.server.origins import OriginReader
from specserve.server.replies import StepOrigins
from specserve.server.sse import DONE_MARKED, Framing
from specserve.tokenizer import Tokenizer
from specserve.types import TokenChunk


class ChoiceShape:
    framing: ClassVar[Framing] = DONE_MARKED

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._readers: dict[int, OriginReader] = {}  # by choice, where origins are asked for

    def _origins(self, idx: int, chunk: TokenChunk) -> list[StepOrigins] | UnsetType:
        if not self._job.return_token_origins:
            return UNSET
        if idx not in self._readers:
            skips = self._job.params.skip_special_tokens
            self._readers[idx] = OriginReader(self._tokenizer, skip_special_tokens=skips)
        return self._readers[idx].read(chunk)

    def opening(self) -> list[msgspec.Struct]:
        return []

    def failure(self, error: RequestError) -> msgspec.Struct:
        return ErrorReply(error_detail(error))
