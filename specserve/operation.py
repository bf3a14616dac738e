"""How a server is run, from options to the settings of its HTTP side: an operator's mistakes are
said in one line, before anything is loaded."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from specserve.errors import ConfigError
from specserve.options import ServeOptions
from specserve.server.cors import CorsPolicy
from specserve.server.keys import KEYS_VARIABLE, read_keys
from specserve.server.state import ServerSettings
from specserve_observability.logs import get_logger


def settings_of(options: ServeOptions, environment: Mapping[str, str]) -> ServerSettings:
    """ConfigError names the option at fault, its value and what is allowed."""
    if not options.drain_seconds >= 0:
        raise ConfigError(f"--drain-seconds is {options.drain_seconds}, it must be 0 or more")
    if options.max_waiting_tokens < 1:
        raise ConfigError(
            f"--max-waiting-tokens is {options.max_waiting_tokens}, it must be at least 1"
        )
    keys = read_keys(options.api_key_file, environment.get(KEYS_VARIABLE))
    per_key = options.max_concurrent_per_key
    if per_key is not None:
        if per_key < 1:
            raise ConfigError(f"--max-concurrent-per-key is {per_key}, it must be at least 1")
        if keys is None:
            raise ConfigError(
                f"--max-concurrent-per-key is {per_key}, but there are no keys: "
                f"give --api-key-file or {KEYS_VARIABLE}"
            )
    origins = options.cors_origins
    return ServerSettings(
        drain_seconds=options.drain_seconds,
        max_waiting_tokens=options.max_waiting_tokens,
        keys=keys,
        max_concurrent_per_key=per_key,
        cors=CorsPolicy() if origins is None else CorsPolicy.parse(origins),
    )


def warn_if_open(host: str, settings: ServerSettings) -> None:
    """Anybody in the network can use a server that listens there and asks for no key."""
    if settings.keys is None and not _is_loopback(host):
        get_logger("specserve.serve").warning(
            "open_to_the_network",
            host=host,
            meaning="whoever reaches this port may use it; --api-key-file asks for keys",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"
