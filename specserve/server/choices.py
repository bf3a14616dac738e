"""What the streams of /v1/completions and /v1/chat/completions have in common."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from specserve.errors import RequestError
from specserve.server.errors import ErrorReply, error_detail
from specserve.server.job import Job
from specserve.server.sse import DONE_MARKED, Framing


class ChoiceShape:
    framing: ClassVar[Framing] = DONE_MARKED

    def __init__(self, job: Job) -> None:
        self._job = job

    def opening(self) -> list[msgspec.Struct]:
        return []

    def failure(self, error: RequestError) -> msgspec.Struct:
        return ErrorReply(error_detail(error))
