"""Seconds of kernels on one device: products, attention, and kernels that only move bytes (roofline model: Williams et
al., Communications of the ACM 52(4), 2009)."""

from __future__ import annotations

from miles_like.device_table import Device
from miles_like.timing.rates.calibration import ATTENTION, MEMORY, PRODUCTS, TILE


def product_rate(device: Device, *, fp8: bool) -> float:
    """FLOP/s of large matrix products."""
    peak = device.fp8 if fp8 and device.fp8 is not None else device.bf16
    return PRODUCTS[device.name] * peak


def product(flops: float, nbytes: float, device: Device, *, fp8: bool = False) -> float:
    """Seconds of a matrix product of `flops`; nbytes: of its operands and result that are not in a cache."""
    return max(flops / product_rate(device, fp8=fp8), moved(nbytes, device))


def attention(flops: float, device: Device) -> float:
    """Seconds of a fused attention kernel of `flops` in BF16, which skips the masked half."""
    return flops / (ATTENTION * product_rate(device, fp8=False))


def moved(nbytes: float, device: Device) -> float:
    """Seconds of kernels that read and write `nbytes` in total."""
    return nbytes / (MEMORY * device.hbm)


def padded(tokens: float, experts: float) -> float:
    """Rows of a grouped product: each of `experts` experts gets an equal share of `tokens`, rounded up to whole
    tiles."""
    return tokens + experts * TILE / 2
