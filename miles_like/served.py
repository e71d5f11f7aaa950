"""The rollout's checkpoint: in which format it is served, and how it is made where another was fetched."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_bridge.config import PrecisionConfig
from megatron_bridge.convert.source import Source
from megatron_bridge.precision import served_spec
from miles_like.hf_checkpoint import write_hf
from miles_like.quantize import in_bundles
from quant.hf_config import quantized_config
from quant.spec import QuantSpec
from quant.stream import quantize_stream


def served_config(precision: PrecisionConfig, hf: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the checkpoint that is served. Raises as `served_spec`."""
    return quantized_config(hf, served_spec(precision, hf))


def store_served(fetched: Path, out: Path, spec: QuantSpec | None) -> None:
    """The fetched checkpoint, whatever it is stored in, as `spec` says: decoded and encoded tensor by tensor, weights
    that share a scale together. Raises ValueError naming a tensor that is damaged or not finite; `out` is then not
    there."""
    source = Source.open(fetched)
    names = source.names()

    def read(name: str) -> Tensor:
        return source.rows(name, 0, source.shape(name)[0]) if source.is_coded(name) else source.hf.read(name)

    shutil.rmtree(out, ignore_errors=True)
    stored = quantize_stream(in_bundles(names, source.shape, read, spec), spec)
    write_hf(out, stored, quantized_config(source.hf.config, spec, sorted(names)), copy_from=fetched)
