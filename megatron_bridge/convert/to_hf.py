"""`torch_dist` -> Hugging Face safetensors, BF16 or quantized, without a model or a process group, in bounded memory.

The source is a converted directory, or a trainer's checkpoint of any layout, whose optimizer state is ignored. The
family's table is read backwards: each Hugging Face tensor consists of rows of a Megatron parameter, or of one expert in
the tensor that all experts of a layer share. Draft layers, if the source has them, are written with the copies of
embedding and head that their checkpoints hold.

A unit is a file of the output. Its header follows from the shapes, so tensors are written in bands of rows. A band to
be encoded consists of complete rows of blocks, which `quant` encodes as in whole tensors; the scales of a weight (at
most 1/16 of its size) are held until its codes are written. If scales depend on the largest magnitude of a weight, or
of two weights together, their rows are read a second time.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_bridge.convert.directory.manifest import MANIFEST, Fact, FileFact, Manifest, Piece
from megatron_bridge.convert.directory.torch_dist import METADATA, TorchDist
from megatron_bridge.convert.hf_outputs import Output, WriteShards, bind, held_bytes, outputs, shards
from megatron_bridge.convert.memory_limit import Memory, plan_memory
from megatron_bridge.convert.units import (
    ConvertReport,
    Spread,
    Watch,
    building,
    files_of,
    finished_unit,
    run_units,
    unwatched,
    write_file,
)
from megatron_bridge.families.base import SCORE, TensorMap
from megatron_bridge.families.registry import with_scalar_head
from miles_like.hf.checkpoint import companions, read_config
from quant.hf_config import MODELOPT_FILE, modelopt_file, quantized_config, spec_from_hf
from quant.spec import QuantFormat, QuantSpec

SHARD_BYTES = 2 << 30
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
DRAFT_LAYERS = "num_nextn_predict_layers"  # config.json's key for their number
_PLAIN_BUFFERS, _CODED_BUFFERS = 4, 6  # per worker: chunk, band, cast; codes and the encoder's temporaries


def to_hf(
    megatron_dir: Path | str,
    out: Path | str,
    *,
    format: str = "bf16",
    hf_config: Path | str | None = None,
    lora_alpha: float | None = None,
    memory_limit: int = 4 << 30,
    workers: int = 1,
    spread: Spread | None = None,
    watch: Watch = unwatched,
    shard_bytes: int = SHARD_BYTES,
) -> ConvertReport:
    """Write the new Hugging Face directory `out`, including all files of the source's `hf/` (tokenizer and others).

    Tensors have the dtype of config.json (routing biases fp32), as when published: fp32 parameters of a BF16 model are
    rounded. A model with a scalar head is written as ...ForSequenceClassification, even if the config differs.
    `format`, a `QuantFormat`: if the source's quantization_config has that format, its modules and blocks are
    quantized, otherwise the format's default modules and blocks. `hf_config`: directory with config.json and companion
    files, for a source without `hf/`. Draft layers of the config that a trainer did not save are omitted, and the new
    config.json has none. `lora_alpha` merges the checkpoint's adapters, W + lora_alpha / rank B A, rounded once. Files
    have about `shard_bytes`. `memory_limit` is in bytes, for all processes of this machine. `watch` shows the progress.

    Raises ValueError, leaving nothing of `out`, when it exists, or when the source is incomplete, differs from its
    manifest, is of another model than the config, has a value that is not finite, or holds adapters without a
    lora_alpha. Raises OSError when the disk is full; finished units are kept for the next run.
    """
    megatron_dir, out = Path(megatron_dir), Path(out)
    if lora_alpha is not None and not 0 < lora_alpha < math.inf:
        raise ValueError(f"lora_alpha = {lora_alpha}: use the run's lora.alpha, a positive number")
    source = TorchDist(megatron_dir)
    config_dir = _config_dir(megatron_dir, hf_config)
    if hf_config is None:
        _check_companions(source)
    config = original = read_config(config_dir)
    raw_config = (config_dir / CONFIG).read_bytes()
    if SCORE in source:
        config = with_scalar_head(config)
    spec = _spec(format, config)
    table = bind(source, config)
    tensors, dropped = outputs(source, table, spec, merge=lora_alpha is not None), _dropped_draft_layers(source, table)
    memory = _memory(source, tensors, spec, memory_limit, workers, separate_process=spread is not None)
    job = WriteShards(
        megatron_dir,
        shards(tensors, spec, shard_bytes),
        spec,
        chunk_bytes=memory.chunk_bytes,
        lora_alpha=lora_alpha,
        identity=_identity(source),
    )
    with building(out, job) as partial:
        kept = run_units(job, partial, workers=memory.workers, spread=spread, watched=watch(partial, job.nbytes))
        names = sorted(o.name for o in tensors)
        written = config if spec == spec_from_hf(config) else quantized_config(config, spec, names)
        written = written | ({DRAFT_LAYERS: 0} if dropped else {})
        _finish(job, partial, config_dir, raw_config if written == original else _json(written), modelopt_file(written))
    size = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    return ConvertReport(tensors=len(tensors), skipped=dropped, bytes=size, units=job.count, units_kept=kept)


def _memory(
    source: TorchDist, tensors: Sequence[Output], spec: QuantSpec, limit: int, workers: int, *, separate_process: bool
) -> Memory:
    coded = [o for o in tensors if o.quantized]
    return plan_memory(
        limit,
        workers,
        separate_process=separate_process,
        names=len(tensors) + len(source.metadata.storage_data),  # also the optimizer's pieces of a trainer's checkpoint
        buffers=_PLAIN_BUFFERS if spec.format is QuantFormat.BF16 else _CODED_BUFFERS,
        # the encoder takes complete rows of blocks, in fp32
        least=max((4 * spec.block[0] * o.row_elements for o in coded), default=1),
        scratch=max((held_bytes(o, spec) for o in coded), default=0),
    )


def _finish(job: WriteShards, partial: Path, config_dir: Path, config: bytes, modelopt: dict[str, Any] | None) -> None:
    """Write the files that complete the checkpoint, and the manifest."""
    facts = _facts(job, partial)
    files = {**files_of(job, partial), **_companions(config_dir, partial), CONFIG: write_file(partial / CONFIG, config)}
    if modelopt is not None:
        files[MODELOPT_FILE] = write_file(partial / MODELOPT_FILE, _json(modelopt))
    if job.count > 1:
        files[INDEX] = write_file(partial / INDEX, _json(_index(facts)))
    Manifest("hf", facts, files).write(partial)


def _dropped_draft_layers(source: TorchDist, table: TensorMap) -> tuple[str, ...]:
    """Names of draft layers that were not trained, so that config.json must not list them. A converted directory
    without draft layers equals its source, so none are dropped."""
    if source.manifest is not None or any(place.depth is not None for place in table.places()):
        return ()
    whole = table.family.bind(table.hf, mtp=True)
    return tuple(place.hf_name for place in whole.places() if place.depth is not None)


def _facts(job: WriteShards, partial: Path) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    for number in range(job.count):
        for name, dtype, shape, start, size, digest in finished_unit(job, partial, number).facts:
            piece = Piece(job.file(number), start, size, digest, (0,) * len(shape), tuple(shape))
            facts[name] = Fact(dtype, tuple(shape), (piece,))
    return facts


def _index(facts: Mapping[str, Fact]) -> dict[str, Any]:
    total = sum(fact.pieces[0].size for fact in facts.values())
    return {
        "metadata": {"total_size": total},
        "weight_map": {name: fact.pieces[0].file for name, fact in facts.items()},
    }


def _config_dir(megatron_dir: Path, hf_config: Path | str | None) -> Path:
    directory = megatron_dir / "hf" if hf_config is None else Path(hf_config)
    if hf_config is None and not directory.is_dir():
        raise ValueError(
            f"{megatron_dir} has no hf/ directory with the model's config.json and tokenizer: pass the Hugging "
            "Face directory of the trained model with --hf-config, or use miles-like export"
        )
    if not (directory / CONFIG).is_file():
        raise ValueError(f"{directory / CONFIG} is missing: pass the Hugging Face directory of the model")
    return directory


def _spec(format: str, config: Mapping[str, Any]) -> QuantSpec:
    if format not in tuple(QuantFormat):
        raise ValueError(f"format {format!r} is not supported: expected one of {', '.join(QuantFormat)}")
    own = spec_from_hf(config)
    return own if own is not None and own.format == format else QuantSpec.of(QuantFormat(format))


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _companions(directory: Path, partial: Path) -> dict[str, FileFact]:
    """Copy the small files next to config.json."""
    facts = {}
    for file in companions(directory):
        name = file.relative_to(directory)
        (partial / name).parent.mkdir(exist_ok=True)
        facts[str(name)] = write_file(partial / name, file.read_bytes())
    return facts


def _check_companions(source: TorchDist) -> None:
    """Raise ValueError when a file under `hf/` is missing or differs from the manifest."""
    for name, fact in source.manifest.files.items() if source.manifest is not None else ():
        file = source.path / name
        if name.startswith("hf/") and (
            not file.is_file() or hashlib.sha256(file.read_bytes()).hexdigest() != fact.sha256
        ):
            raise ValueError(f"{file} differs from the file that the manifest lists: convert the checkpoint again")


def _identity(source: TorchDist) -> str:
    """A hash that identifies the source: of its manifest, or of the sizes and times of its files."""
    if source.manifest is not None:
        return hashlib.sha256((source.path / MANIFEST).read_bytes()).hexdigest()
    files = sorted(f for f in source.path.iterdir() if f.suffix == ".distcp" or f.name == METADATA)
    stats = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()
