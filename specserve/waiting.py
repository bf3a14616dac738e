"""How tensor threads wait for each other. Imports nothing: it must run before torch is loaded.

OpenMP's threads spin at every barrier (some hundreds in one step) unless told otherwise. When
another process wants a core, the spinning thread takes it from the one that is waited for. Measured
on two cores beside one busy process: a one-row step of the demo model takes 1,450 ms spinning and
65 ms sleeping. The server's own event loop is such another thread, too.
"""

from __future__ import annotations

import os


def sleep_at_barriers() -> None:
    """Before torch is imported; a choice the user has made in the environment stands."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
