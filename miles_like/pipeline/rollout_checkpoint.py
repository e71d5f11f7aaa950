"""Converts the fetched checkpoint to the one that the rollout serves."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from megatron_bridge.convert.source import Source
from megatron_bridge.plan.precision import served_spec
from miles_like.config.run import RunConfig
from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.pipeline.quantize import in_bundles
from miles_like.storage.completion import Output, OutputFile, file_fact, files_under, write_atomically
from quant.hf_config import quantized_config, spec_from_hf
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


def served_output(config: RunConfig, fetched: Output, out: Path) -> Output:
    """The checkpoint that the rollout serves: the fetched one, converted to the rollout's format if it has another."""
    hf = HFCheckpoint(fetched.root).config
    spec = served_spec(config.precision, hf)
    if spec == spec_from_hf(hf):
        return fetched
    record = out.with_name("served.json")
    if (facts := _recorded(record, out)) is None:
        shutil.rmtree(out, ignore_errors=True)
        store_served(fetched.root, out, spec)
        facts = {p.name: file_fact(p) for p in files_under(out)}
        write_atomically(record, json.dumps(facts))
    return Output(out, facts)


def _recorded(record: Path, directory: Path) -> Mapping[str, OutputFile] | None:
    """The files of an encoded checkpoint whose encoding has ended and which are all there; None otherwise."""
    if not record.is_file():
        return None
    facts: dict[str, OutputFile] = json.loads(record.read_text(encoding="utf-8"))
    sizes = {p.name: p.stat().st_size for p in files_under(directory)} if directory.is_dir() else {}
    return facts if sizes == {name: fact["size"] for name, fact in facts.items()} else None
