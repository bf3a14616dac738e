"""API keys: who may ask, told from everybody else without saying how near a guess was.

Only digests under a secret of this process are kept, so that no repr, log line or core dump of the
server's own state shows a key, and so that comparing them says nothing about the keys themselves.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from aiohttp import web

from specserve.errors import ConfigError, RequestError
from specserve.server.playground import PAGES
from specserve.server.traffic import CLASS_RULE, is_class_name

KEYS_VARIABLE = "SPECSERVE_API_KEYS"
MIN_KEY_CHARS = 16
MAX_KEY_CHARS = 256

# A process supervisor must reach these without a secret, and they tell it nothing else. /metrics
# is not among them: it shows load and models. The playground's files are the same everywhere.
OPEN_ROUTES = frozenset({"/health", "/ready", "/version", *PAGES})

_WITH_CLASS = re.compile(r"\s*(\S+)\s+class=(\S*)\s*")
_KEY = re.compile(rf"[!-~]{{{MIN_KEY_CHARS},{MAX_KEY_CHARS}}}")


class KeyRing:
    """The keys of one server."""

    def __init__(self, keys: Iterable[str], classes: Mapping[str, str] | None = None) -> None:
        """classes: traffic class by key; a key that it leaves out has none"""
        unique = list(dict.fromkeys(keys))
        self._secret = secrets.token_bytes(32)
        self._digests = [self._digest(key.encode()) for key in unique]
        self._classes = [(classes or {}).get(key) for key in unique]

    def __len__(self) -> int:
        return len(self._digests)

    def _digest(self, key: bytes) -> bytes:
        return hmac.digest(self._secret, key, "sha256")

    @property
    def classes(self) -> tuple[str, ...]:
        """The traffic classes that keys belong to, each once."""
        return tuple(dict.fromkeys(name for name in self._classes if name is not None))

    def class_of(self, key_idx: int) -> str | None:
        return self._classes[key_idx]

    def find(self, key: bytes) -> int | None:
        """The key's index. Every key is looked at, whichever it is."""
        digest = self._digest(key)
        found = None
        for idx, known in enumerate(self._digests):
            if hmac.compare_digest(known, digest):
                found = idx
        return found

    def identify(self, request: web.Request) -> int:
        """Index of the key that the request carries; RequestError 401 without a valid one.

        Anthropic's clients send x-api-key, which counts where there is no Authorization.
        """
        given = request.headers.getall("authorization", [])
        if not given:
            given = [f"Bearer {key}" for key in request.headers.getall("x-api-key", [])]
        scheme, _, key = given[0].strip().partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() != "bearer":
            raise _unauthorized(
                "this server asks for an API key: send one header `Authorization: Bearer KEY` or "
                "`x-api-key: KEY`",
                "missing_api_key",
            )
        # What is not UTF-8 arrives as surrogates.
        found = self.find(key.strip().encode(errors="surrogateescape"))
        if found is None:
            raise _unauthorized("the API key is not one of this server's", "invalid_api_key")
        return found


def _unauthorized(message: str, code: str) -> RequestError:
    return RequestError(message, code=code, status=401)


class Slots:
    """How many requests each key has under way."""

    def __init__(self, limit: int | None) -> None:
        """limit: per key; None: as many as they like"""
        self._limit = limit
        self._held: dict[int, int] = {}

    @contextmanager
    def held(self, key_idx: int) -> Iterator[None]:
        """Around one request; RequestError 429 where its key has as many as it may."""
        if self._limit is None:
            yield
            return
        num_held = self._held.get(key_idx, 0)
        if num_held >= self._limit:
            raise RequestError(
                f"this API key has {num_held} requests under way, the limit is {self._limit} "
                "(--max-concurrent-per-key): wait until one ends",
                code="too_many_concurrent_requests",
                status=429,
            )
        self._held[key_idx] = num_held + 1
        try:
            yield
        finally:
            self._held[key_idx] -= 1


def read_keys(file: str | None, variable: str | None) -> KeyRing | None:
    """file: path, one key a line, behind it `class=NAME` where it belongs to a traffic class;
    variable: the value of SPECSERVE_API_KEYS, keys by comma.

    None where neither is given: the server is open. ConfigError names a bad key's place, and never
    the key. What is given must hold a key: an empty secret must not open the server.
    """
    keys: list[str] = []
    classes = dict[str, str]()
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} cannot be read: {error}") from None
        source = f"--api-key-file {file}"
        split = [_split(line, f"{source}: line {number}") for number, line in enumerate(lines, 1)]
        classes = {key: name for key, name in split if name is not None}
        keys += _checked([key for key, _ in split], source, "line")
    if variable is not None:
        keys += _checked(variable.split(","), KEYS_VARIABLE, "key")
    if file is None and variable is None:
        return None
    return KeyRing(keys, classes)


def _split(line: str, place: str) -> tuple[str, str | None]:
    """A line's key and its traffic class; ConfigError for a bad name of one, which is not shown:
    it may be a key in the wrong place."""
    found = _WITH_CLASS.fullmatch(line)
    if found is None:
        return line, None
    key, name = found.groups()
    if not is_class_name(name):
        raise ConfigError(f"{place}: {CLASS_RULE}")
    return key, name


def _checked(lines: list[str], source: str, unit: str) -> list[str]:
    keys = []
    for number, line in enumerate(lines, 1):
        key = line.strip()
        if not key:
            continue
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{source}: {unit} {number} has {len(key)} characters, a key is {MIN_KEY_CHARS} to "
                f"{MAX_KEY_CHARS} printable ASCII characters without spaces"
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{source} holds no key: give one, or leave it out to serve everybody")
    return keys
