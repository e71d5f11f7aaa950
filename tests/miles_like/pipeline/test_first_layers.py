"""Law: a checkpoint of the first layers computes what the whole model computes up to there."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.config.run import ModelConfig
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.pipeline.fetch import fetch, source_inputs
from miles_like.pipeline.first_layers import (
    INDEX,
    downloaded_bytes,
    is_kept,
    needed_files,
    restrict_index,
    shortened,
)
from tests.support.refusals import refuses
from tests.support.sparse_models import FILE_BYTES, published_config, stored_tensors
from tests.support.tiny_models import (
    random_tensors,
    tiny,
    tiny_dense,
    tiny_glm,
    tiny_qwen,
    write_checkpoint,
)

stored_of = functools.cache(lambda name: tuple(stored_tensors(published_config(name))))
FAMILIES = {"deepseek": tiny, "qwen": tiny_qwen, "dense": tiny_dense, "glm": tiny_glm}


def hidden(directory: Path, ids: torch.Tensor, layer: int | None = None) -> torch.Tensor:
    """The last hidden state, after the final norm; with `layer`, the norm of what that layer is given."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        out = model.model(ids, output_hidden_states=True)
        found: torch.Tensor = out.last_hidden_state if layer is None else model.model.norm(out.hidden_states[layer])
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_the_whole_model_does_up_to_there(family: str, tmp_path: Path) -> None:
    hf = FAMILIES[family]()
    have = hf["num_hidden_layers"]
    whole = write_checkpoint(tmp_path / "whole", hf, random_tensors(hf, mtp="num_nextn_predict_layers" in hf))
    model = ModelConfig(path=str(whole), first_layers=have - 1)
    short = fetch(model, tmp_path / "stage", lambda _: None)
    assert short != whole and HFCheckpoint(short).config["num_hidden_layers"] == have - 1
    assert not any(f"layers.{have - 1}." in name for name in HFCheckpoint(short).names())
    ids = torch.arange(2, 14)[None]
    assert torch.equal(hidden(short, ids), hidden(whole, ids, layer=have - 1))


def test_lists_of_layers_are_cut_and_drafts_left_out() -> None:
    config: dict[str, Any] = {"num_hidden_layers": 3, "num_nextn_predict_layers": 1, "layer_types": ["a", "b", "c"]}
    assert shortened(config, 2) == {
        "num_hidden_layers": 2,
        "num_nextn_predict_layers": 0,
        "layer_types": ["a", "b"],
    }
    with refuses(ValueError, "model.first_layers", 4, 3):
        shortened(config, 4)


def test_only_files_with_a_kept_tensor_are_needed(tmp_path: Path) -> None:
    weight_map = {
        "model.embed_tokens.weight": "a",
        "model.layers.0.mlp.weight": "a",
        "model.layers.1.mlp.weight": "b",
        "model.layers.11.mlp.weight": "b",
        "model.layers.12.mlp.weight": "c",
        "lm_head.weight": "d",
    }
    assert needed_files(weight_map, 2) == ["a", "b", "d"]
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    restrict_index(tmp_path, ["a", "b", "d"])
    left = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert set(left.values()) == {"a", "b", "d"} and [n for n in left if not is_kept(n, 2)]


@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_30b_a3b"])
def test_the_bytes_of_those_files_are_bounded_before_there_is_an_index(name: str, by_layer: bool) -> None:
    """True names and shapes, in files of 5 GiB or in one for each layer. The bound is at most two files above."""
    hf, layers = published_config(name), 6
    files: dict[str, int] = {}
    weight_map: dict[str, str] = {}
    sizes: dict[str, int] = {}
    at, full = "0", 0
    for tensor, dtype, shape in stored_of(name):
        sizes[tensor] = math.prod(shape) * dtype.itemsize
        if by_layer:
            at = tensor.split("layers.")[-1].split(".")[0]
        elif files.get(at, 0) + sizes[tensor] > FILE_BYTES:
            full += 1
            at = str(full)
        files[at] = files.get(at, 0) + sizes[tensor]
        weight_map[tensor] = at
    have = int(hf["num_hidden_layers"])
    whole = sum(n for tensor, n in sizes.items() if is_kept(tensor, have))
    kept = sum(n for tensor, n in sizes.items() if is_kept(tensor, layers))
    downloaded = sum(files[file] for file in needed_files(weight_map, layers))
    bound = downloaded_bytes(hf, layers, kept, whole)
    assert kept <= downloaded <= bound <= kept + 2 * max(FILE_BYTES, (whole - kept) // (have - layers))
    assert bound < whole / 2 and downloaded_bytes(hf, have, whole, whole) == whole


def test_another_number_of_layers_is_another_checkpoint(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", tiny(), random_tensors(tiny()))
    inputs = [source_inputs(ModelConfig(path=str(whole), first_layers=n)) for n in (None, 1, 2)]
    assert inputs[0] != inputs[1] != inputs[2] and "first_layers" not in inputs[0]


def test_a_model_that_is_made_has_its_own_number_of_layers() -> None:
    make = {"config": "c.json", "tokenizer": "t", "corpus": "x.jsonl", "validation": "y.jsonl"}
    with refuses(ValueError, "model.first_layers", 2, "model.make"):
        ModelConfig(path="made", first_layers=2, make=make)  # type: ignore[arg-type]
