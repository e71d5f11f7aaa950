"""Kernels against published measurements, and the shape of the roofline.

Not covered: small or narrow products, which reach less.
"""

from __future__ import annotations

import pytest

from miles_like.device_table import DEVICES, device
from miles_like.timing.rates import calibration
from miles_like.timing.rates.roofline import attention, moved, padded, product, product_rate

# TFLOP/s of products of 8,192^3 and TB/s of STREAM's triad: "Azure/AI-benchmarking-guide", Azure_Results
GEMM = {"A100": 253.7, "H100": 1290.1, "H200": 1300.6, "GB200": 2876.6, "MI300X": 1159.2}
TRIAD = {"A100": 1.70, "H100": 2.97, "H200": 4.15, "MI300X": 4.09}


@pytest.mark.parametrize("name", GEMM)
def test_a_large_product_takes_what_azure_measured(name: str) -> None:
    one, flops = device(name), 2 * 8192**3
    seconds = product(flops, 3 * 8192**2, one, fp8=one.fp8 is not None)
    assert seconds == pytest.approx(flops / (GEMM[name] * 1e12), rel=0.1)


@pytest.mark.parametrize("name", TRIAD)
def test_memory_moves_what_azure_measured(name: str) -> None:
    assert moved(1e12, device(name)) == pytest.approx(1 / TRIAD[name], rel=0.12)


def test_every_device_has_its_constants() -> None:
    for constants in (calibration.PRODUCTS, calibration.REACHED):
        assert constants.keys() == DEVICES.keys() and all(0.3 < x < 1 for x in constants.values())


def test_a_product_takes_the_longer_of_its_operations_and_its_bytes() -> None:
    h100 = device("H100")
    ridge = product_rate(h100, fp8=False) / (calibration.MEMORY * h100.hbm)  # FLOP a byte
    assert product(ridge * 1e9, 1e9, h100) == pytest.approx(moved(1e9, h100))
    assert product(ridge * 2e9, 1e9, h100) == pytest.approx(2 * moved(1e9, h100))
    assert product(0.0, 1e9, h100) == moved(1e9, h100)
    assert product(1e15, 0.0, h100, fp8=True) == pytest.approx(product(1e15, 0.0, h100) / 2, rel=0.001)
    assert product(1e15, 0.0, device("A100"), fp8=True) == product(1e15, 0.0, device("A100"))  # it has no FP8
    assert attention(1e15, h100) > product(1e15, 0.0, h100)


def test_tiles_are_whole_on_average() -> None:
    """The mean of ceil(n / 128) over evenly spread sizes is half a tile above n / 128."""
    sizes = range(1024, 1024 + 128 * 8)
    exact = sum(-(-n // 128) * 128 for n in sizes) / len(sizes)
    assert padded(sum(sizes) / len(sizes), 1) == pytest.approx(exact, rel=0.001)
