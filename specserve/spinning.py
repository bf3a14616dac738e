"""How long tensor threads spin for each other. Imports nothing: it must run before torch is loaded.

GNU OpenMP's threads spin at every barrier (some hundreds in one step), by default for about a
millisecond. When another process wants a core, the spinning thread takes it from the one that is
waited for. Measured on two cores, ms of a one-row step of the demo model, medians of 7, one run:

    GOMP_SPINCOUNT      0   3000  10000  30000  100000  default
    machine idle       70     63     53     54      46    51-61
    one busy process   64     96    166    306     461    1,450
"""

from __future__ import annotations

import os


def spin_briefly() -> None:
    """Before torch is imported; a choice the user has made in the environment stands."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
