"""The rollout's checkpoint: in which format it is served, and how it is made where another was fetched."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_bridge.config import PrecisionConfig
from megatron_bridge.families.registry import family_of
from miles_like.hf_checkpoint import HFCheckpoint, write_hf
from quant.hf_config import quantized_config, spec_from_hf
from quant.spec import QuantSpec
from quant.stream import dequantize_stream, quantize_stream


def served_spec(precision: PrecisionConfig, hf: Mapping[str, Any]) -> QuantSpec | None:
    """How the rollout's weights are stored, of a model with this config.json; None: in BF16.

    A checkpoint that comes in the run's format is served as it is, in its own blocks and with its own modules; any
    other is stored anew. Raises ValueError for blocks or a scope in the configuration that the former does not have.
    """
    want, own = precision.spec(), spec_from_hf(hf)
    if want is None or own is None or own.format is not want.format:
        return want
    if precision.block is not None and precision.block != own.block:
        raise ValueError(
            f"precision.block = {list(precision.block)}, but the checkpoint's {own.format} scales are of blocks of "
            f"{list(own.block)}: trained and served weights would differ; remove precision.block, or fetch the BF16 "
            "checkpoint, which is then stored in blocks of that size"
        )
    if precision.scope is not None:
        for place in family_of(hf).bind(hf).places():
            in_run, in_file = (s.covers(place.hf_name, place.shape) for s in (want, own))
            if in_run != in_file:
                raise ValueError(
                    f"precision.scope = {precision.scope!r} says that {place.hf_name} is "
                    f"{'quantized' if in_run else 'BF16'}, the checkpoint's quantization_config that it is "
                    f"{'quantized' if in_file else 'BF16'}: remove precision.scope, or fetch the BF16 checkpoint"
                )
    return own


def served_config(precision: PrecisionConfig, hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the checkpoint that is served. Raises as `served_spec`."""
    return quantized_config(hf, served_spec(precision, hf))


def store_served(fetched: Path, out: Path, spec: QuantSpec | None) -> None:
    """The fetched checkpoint, whatever it is stored in, as `spec` says: decoded and encoded tensor by tensor."""
    hf = HFCheckpoint(fetched)

    def part(name: str) -> Tensor | None:
        return hf.read(name) if name in hf else None

    shutil.rmtree(out, ignore_errors=True)
    plain = dequantize_stream(hf.stream(), spec_from_hf(hf.config), lookup=part)
    write_hf(out, quantize_stream(plain, spec), quantized_config(hf.config, spec), copy_from=fetched)
