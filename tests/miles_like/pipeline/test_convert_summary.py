"""The line that a conversion prints.

Why it must hold: a rate of 0.00 GB/s says nothing. Not covered: the conversion.
"""

from __future__ import annotations

import pytest

from miles_like.pipeline.convert import speed


@pytest.mark.parametrize(
    ("nbytes", "seconds", "shown"),
    [
        (3_000_000_000, 2.0, "1.50 GB/s"),
        (2_500_000, 1.0, "2.50 MB/s"),
        (1_900, 1.0, "1.90 kB/s"),
        (0, 0.0, "0.00 kB/s"),
    ],
)
def test_a_rate_has_the_unit_that_leaves_a_digit(nbytes: int, seconds: float, shown: str) -> None:
    assert speed(nbytes, seconds) == shown
