"""From options to the settings of the server's HTTP side."""

from __future__ import annotations

import pytest

from specserve.errors import ConfigError
from specserve.operation import settings_of, warn_if_open
from specserve.options import ServeOptions
from specserve.server.keys import KeyRing
from specserve.server.state import ServerSettings

KEY = "k-0123456789abcdef"


def test_keys_of_the_environment_are_asked_for_and_an_empty_variable_is_no_open_door() -> None:
    options = ServeOptions(max_concurrent_per_key=3)
    settings = settings_of(options, {"SPECSERVE_API_KEYS": KEY})
    assert settings.keys is not None
    assert settings.keys.find(KEY.encode()) == 0
    assert settings.max_concurrent_per_key == 3
    assert settings_of(ServeOptions(), {}).keys is None
    with pytest.raises(ConfigError, match="SPECSERVE_API_KEYS holds no key"):
        settings_of(ServeOptions(), {"SPECSERVE_API_KEYS": ""})


@pytest.mark.parametrize(
    ("host", "keys", "warns"),
    [
        ("127.0.0.1", None, False),
        ("localhost", None, False),
        ("::1", None, False),
        ("0.0.0.0", None, True),
        ("::", None, True),
        ("example.org", None, True),
        ("0.0.0.0", KeyRing([KEY]), False),
    ],
)
def test_an_open_server_is_warned_about_and_no_other(
    host: str, keys: KeyRing | None, warns: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    warn_if_open(host, ServerSettings(keys=keys))
    out = capfd.readouterr()
    assert ("open_to_the_network" in out.out + out.err) == warns
