"""Endless send times of open loops, in seconds from the start; the same seed, the same times.

A ramp is a change of clock: arrivals of the full rate, moved so that the expected number until t
grows as the rate's integral does. So a ramped load is the same process, and no second one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import sqrt

from specserve_loadgen.settings import OpenLoop


def arrival_times(load: OpenLoop, seed: int) -> Iterator[float]:
    """Send times of an open loop with its ramp."""
    times = accumulate(_gaps(load, random.Random(seed)))
    return (_ramped(seconds, load.ramp) for seconds in times)


def _gaps(load: OpenLoop, rng: random.Random) -> Iterator[float]:
    """Endless gaps of mean 1/rate."""
    mean = 1.0 / load.rate
    draws: dict[str, Callable[[], float]] = {
        "poisson": lambda: rng.expovariate(load.rate),
        "constant": lambda: mean,
        # Variance over squared mean is 1/shape: 1 for Poisson, more the burstier it is.
        "gamma": lambda: rng.gammavariate(load.burstiness, mean / load.burstiness),
    }
    draw = draws[load.arrivals]
    while True:
        yield draw()


def _ramped(seconds: float, ramp: float) -> float:
    """When a load that rises evenly over `ramp` has sent what a full one has after `seconds`.

    Until t it has sent t²/(2 ramp) seconds' worth while rising, then t - ramp/2.
    """
    return sqrt(2 * ramp * seconds) if seconds < ramp / 2 else seconds + ramp / 2
