"""The rollout's checkpoint: in which format it is served, and how it is made where another was fetched."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_bridge.config import PrecisionConfig
from megatron_bridge.precision import served_spec
from miles_like.hf_checkpoint import HFCheckpoint, write_hf
from quant.hf_config import quantized_config, spec_from_hf
from quant.registry import codec_or_none
from quant.spec import QuantSpec
from quant.stream import dequantize_stream, part_of, quantize_stream


def served_config(precision: PrecisionConfig, hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the checkpoint that is served. Raises as `served_spec`."""
    return quantized_config(hf, served_spec(precision, hf))


def store_served(fetched: Path, out: Path, spec: QuantSpec | None) -> None:
    """The fetched checkpoint, whatever it is stored in, as `spec` says: decoded and encoded tensor by tensor."""
    hf = HFCheckpoint(fetched)

    def part(name: str) -> Tensor | None:
        return hf.read(name) if name in hf else None

    shutil.rmtree(out, ignore_errors=True)
    own = spec_from_hf(hf.config)
    codec = codec_or_none(own)
    names = {(part_of(codec, name, hf.info(name).dtype) or (name,))[0] for name in hf.names()}
    plain = dequantize_stream(hf.stream(), own, lookup=part)
    write_hf(out, quantize_stream(plain, spec), quantized_config(hf.config, spec, sorted(names)), copy_from=fetched)
