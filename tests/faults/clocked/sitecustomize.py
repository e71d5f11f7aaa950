"""Imported by Python at its start from a directory of PYTHONPATH, for processes under libfaketime.

With FAKETIME_DONT_FAKE_MONOTONIC=1, libfaketime 0.9.10 lets clock_nanosleep of the monotonic clock, which is Python's
`time.sleep`, fail with EINVAL: select sleeps in its place.
"""

import select
import time
from typing import SupportsIndex


def _sleep(seconds: SupportsIndex | float, /) -> None:
    if float(seconds) < 0:
        raise ValueError("sleep length must be non-negative")
    select.select([], [], [], float(seconds))


time.sleep = _sleep
