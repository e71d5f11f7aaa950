"""Converts the fetched checkpoint to the one that the rollout serves."""

from __future__ import annotations

import shutil
from pathlib import Path

from torch import Tensor

from megatron_bridge.convert.source import Source
from miles_like.hf.checkpoint import write_hf
from miles_like.pipeline.quantize import in_bundles
from quant.hf_config import quantized_config
from quant.spec import QuantSpec
from quant.stream import quantize_stream


def store_served(fetched: Path, out: Path, spec: QuantSpec | None) -> None:
    """Write the fetched checkpoint, of any format, to `out` in the format `spec`, tensor by tensor. Raises ValueError,
    leaving no `out`, naming a tensor that is damaged or not finite."""
    source = Source.open(fetched)
    names = source.names()

    def read(name: str) -> Tensor:
        return source.rows(name, 0, source.shape(name)[0]) if source.is_coded(name) else source.hf.read(name)

    shutil.rmtree(out, ignore_errors=True)
    stored = quantize_stream(in_bundles(names, source.shape, read, spec), spec)
    write_hf(out, stored, quantized_config(source.hf.config, spec, sorted(names)), copy_from=fetched)
