"""Traffic classes: whose requests metrics tell apart.

Named when the server starts and no more than MAX_CLASSES: whatever else a header says counts as
`other`, so that no client makes series without end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence as Seq
from typing import Final

import msgspec

from specserve.errors import ConfigError
from specserve_observability.metrics import DEFAULT_CLASS, OTHER

TRAFFIC_CLASS_HEADER: Final = "x-traffic-class"
MAX_CLASSES: Final = 16
CLASS_RULE: Final = (
    "the name of a traffic class is 1 to 32 of a-z, 0-9, _ and -, begins with a letter or digit, "
    f"and is not {OTHER!r}"
)
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")


class TrafficClasses(msgspec.Struct, frozen=True):
    names: tuple[str, ...] = ()  # beside `default`; empty: nobody is told apart

    @classmethod
    def parse(cls, text: str | None, *, beside: Seq[str] = ()) -> TrafficClasses:
        """text: names by comma; beside: those of API keys. ConfigError names what is wrong."""
        given = [] if text is None else [name.strip() for name in text.split(",")]
        for name in given:
            if not is_class_name(name):
                raise ConfigError(f"--traffic-classes has {name[:80]!r}: {CLASS_RULE}")
        names = tuple(name for name in dict.fromkeys([*given, *beside]) if name != DEFAULT_CLASS)
        if len(names) > MAX_CLASSES:
            raise ConfigError(
                f"--traffic-classes and the API keys name {len(names)} traffic classes, the limit "
                f"is {MAX_CLASSES}: each makes series of its own in /metrics"
            )
        return cls(names)

    def named(self, header: str | None) -> str:
        """The class that a request's header names."""
        if header is None or not self.names:
            return DEFAULT_CLASS
        name = header.strip().lower()
        return name if name in (*self.names, DEFAULT_CLASS) else OTHER


def is_class_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None and name != OTHER
