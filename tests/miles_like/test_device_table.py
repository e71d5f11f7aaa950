"""The table of devices against relations that hold whatever the figures are, and against independent ones.

Not covered: figures that their makers correct later.
"""

from __future__ import annotations

import pytest

from miles_like.device_table import DEVICES, GIB, Device, device
from tests.support.refusals import refuses

TENSOR_CORES = {  # (streaming multiprocessors, boost MHz, dense BF16 operations a clock and multiprocessor)
    "A100": (108, 1410, 2048),  # "NVIDIA A100 Tensor Core GPU Architecture" white paper
    "H100": (132, 1830, 4096),  # "NVIDIA H100 Tensor Core GPU Architecture" white paper
    "H200": (132, 1830, 4096),
    "MI300X": (304, 2100, 2048),  # "AMD CDNA 3 Architecture" white paper, compute units
    "RTX4090": (128, 2520, 512),  # "NVIDIA Ada GPU Architecture" white paper
}


@pytest.mark.parametrize("name", TENSOR_CORES)
def test_dense_bf16_is_units_times_clock_times_operations(name: str) -> None:
    units, mhz, operations = TENSOR_CORES[name]
    assert device(name).bf16 == pytest.approx(units * mhz * 1e6 * operations, rel=0.005)


@pytest.mark.parametrize("one", DEVICES.values(), ids=list(DEVICES))
def test_figures_stand_in_the_order_of_their_kinds(one: Device) -> None:
    """Memory is faster than links between devices, those than the host's or the network's; FP8 is twice BF16, the rule
    of all these tensor cores: a figure with sparsity, or of both directions, breaks one of these."""
    assert one.hbm > one.intra >= max(one.host, one.inter)
    assert one.fp8 is None or one.fp8 == pytest.approx(2 * one.bf16, rel=0.001)
    assert 50 < one.bf16 / one.hbm < 400  # FLOP per byte at the ridge of the roofline
    assert one.memory % (1 << 20) == 0 and 16 * GIB < one.memory < 288 * GIB
    assert one.node_memory > one.node_gpus * one.memory and one.domain % one.node_gpus == 0
    assert one.node_disk > one.node_memory and one.disk < one.node_gpus * one.host


def test_an_unknown_device_is_refused() -> None:
    assert device("H100").name == "H100"
    with refuses(ValueError, "H101", "MI300X"):
        device("H101")
