"""A checkpoint of a model's first layers: true widths, names and formats, for a rehearsal on few GPUs.

Embedding, final norm and head are kept; layers from `layers` on, among them those of multi-token prediction, are left
out. The text that such a model writes has no meaning.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.types import NamedTensor

INDEX = "model.safetensors.index.json"
_FILE = 5 << 30  # bytes of a file of most published checkpoints
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def shortened(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """config.json of the first `layers` layers, without multi-token prediction. Lists with an entry for each layer are
    cut. Raises ValueError for more layers than the model has."""
    have = int(config["num_hidden_layers"])
    if layers > have:
        raise ValueError(f"model.first_layers = {layers}, but the model has {have} layers: lower it, or remove it")
    cut = {k: v[:layers] if isinstance(v, list) and len(v) == have else v for k, v in config.items()}
    drafts = {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in config else {}
    return cut | {"num_hidden_layers": layers} | drafts


def is_kept(name: str, layers: int) -> bool:
    """Whether a tensor belongs to the first `layers` layers, or to none."""
    found = _LAYER.search(name)
    return found is None or int(found[1]) < layers


def needed_files(weight_map: Mapping[str, str], layers: int) -> list[str]:
    """The safetensors files that hold a kept tensor. weight_map: tensor name -> file, of the index."""
    return sorted({file for name, file in weight_map.items() if is_kept(name, layers)})


def downloaded_bytes(config: Mapping[str, Any], layers: int, kept: int, whole: int) -> int:
    """At most the bytes of the files that hold a kept tensor, before an index is there to add them up.

    config: config.json of the whole model, which has `whole` bytes, of which `kept` are of the first `layers` layers.
    Published checkpoints have their tensors in the order of the layers, so that only two files hold others beside: that
    with the last kept layer, and that with norm and head. A file has up to 5 GiB, or one layer if that is larger
    (Kimi-K2 has a file for each).
    """
    dropped = int(config["num_hidden_layers"]) - layers
    layer = (whole - kept) // dropped if dropped > 0 else 0
    return min(whole, kept + 2 * max(_FILE, layer))


def restrict_index(directory: Path, files: Iterable[str]) -> None:
    """Rewrite the index of a directory that has only some of its `files`."""
    kept, path = set(files), directory / INDEX
    index = json.loads(path.read_text(encoding="utf-8"))
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file in kept}
    path.write_text(json.dumps(index), encoding="utf-8")


def write_first_layers(source: Path, out: Path, layers: int) -> None:
    """Write the first `layers` layers of `source` to `out`. Raises ValueError as `shortened` and `HFCheckpoint`."""
    checkpoint = HFCheckpoint(source)
    config = shortened(checkpoint.config, layers)
    names = [name for name in checkpoint.names() if is_kept(name, layers)]
    stream = (NamedTensor(name, checkpoint.read(name)) for name in names)
    nbytes = sum(checkpoint.info(name).nbytes for name in names)
    write_hf(out, stream, config, copy_from=source, nbytes=nbytes)
