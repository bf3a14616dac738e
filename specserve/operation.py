"""How a server is run, from options to the settings of its HTTP side: an operator's mistakes are
said in one line, before anything is loaded."""

from __future__ import annotations

import ipaddress
import resource
import ssl
from collections.abc import Mapping

from specserve.errors import ConfigError
from specserve.options import ServeOptions
from specserve.server.cors import CorsPolicy
from specserve.server.keys import KEYS_VARIABLE, read_keys
from specserve.server.state import ServerSettings
from specserve.server.traffic import TrafficClasses
from specserve_observability.logs import get_logger

# Open files beside connections: the listener, the loop, model and trace files, tracing's sockets.
_OTHER_FILES = 128


def settings_of(options: ServeOptions, environment: Mapping[str, str]) -> ServerSettings:
    """ConfigError names the option at fault, its value and what is allowed."""
    _at_least("--drain-seconds", options.drain_seconds, 0)
    _at_least("--sse-keepalive-seconds", options.sse_keepalive_seconds, 0)
    _at_least("--max-waiting-tokens", options.max_waiting_tokens, 1)
    _at_least("--max-connections", options.max_connections, 1)
    _at_least("--trace-steps-per-second", options.trace_steps_per_second, 0)
    _at_least("--trace-file-mb", options.trace_file_mb, 1)
    keys = read_keys(options.api_key_file, environment.get(KEYS_VARIABLE))
    per_key = options.max_concurrent_per_key
    if per_key is not None:
        _at_least("--max-concurrent-per-key", per_key, 1)
        if keys is None:
            raise ConfigError(
                f"--max-concurrent-per-key is {per_key}, but there are no keys: "
                f"give --api-key-file or {KEYS_VARIABLE}"
            )
    origins = options.cors_origins
    return ServerSettings(
        drain_seconds=options.drain_seconds,
        keep_alive_seconds=options.sse_keepalive_seconds or None,
        max_connections=options.max_connections,
        max_waiting_tokens=options.max_waiting_tokens,
        keys=keys,
        traffic_classes=TrafficClasses.parse(
            options.traffic_classes, beside=() if keys is None else keys.classes
        ),
        max_concurrent_per_key=per_key,
        cors=CorsPolicy() if origins is None else CorsPolicy.parse(origins),
        tls=tls_context(options.ssl_certfile, options.ssl_keyfile),
        trace_content=options.trace_content,
        tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
    )


def _at_least(name: str, value: float, least: int) -> None:
    if not value >= least:  # NaN is refused too
        raise ConfigError(f"{name} is {value}, it must be {least} or more")


def tls_context(certfile: str | None, keyfile: str | None) -> ssl.SSLContext | None:
    """None: plain HTTP. certfile: PEM, the server's certificate and those between it and the root;
    keyfile: PEM, its private key without a password; None: it is in certfile."""
    if certfile is None:
        if keyfile is not None:
            raise ConfigError(f"--ssl-keyfile {keyfile} is given without --ssl-certfile")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile, password="")  # never ask on the terminal
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} are no certificate with its "
            f"private key (PEM, no password): {error}"
        ) from None
    return context


def allow_connections(num_connections: int) -> None:
    """Let this process open as many files: the usual soft limit is lower than the hard one."""
    needed = num_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"--max-connections is {num_connections}, but this process may open {hard} files and "
            f"needs {_OTHER_FILES} for itself: raise the limit (ulimit -n) or lower the option"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


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
