"""A damaged Hugging Face checkpoint is refused by `to_megatron` in words that name the file or the tensor, and leaves
nothing: Megatron's loader checks neither dtypes nor finiteness, nor that a vocabulary has the right size.

Not covered: quantized tensors, which `test_source.py` damages.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_bridge.convert.to_megatron import to_megatron
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

HF = tiny()


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "hf", HF, random_tensors(HF), shard_bytes=700_000)


def _drop(t: dict[str, Tensor]) -> Facts:
    del t["model.layers.1.self_attn.o_proj.weight"]
    return 1, "model.layers.1.self_attn.o_proj.weight"


def _add(t: dict[str, Tensor]) -> Facts:
    t["model.layers.1.mlp.experts.16.up_proj.weight"] = torch.zeros(64, 128, dtype=torch.bfloat16)
    return "model.layers.1.mlp.experts.16.up_proj.weight", "config.json"


def _add_empty(t: dict[str, Tensor]) -> Facts:
    t["model.layers.1.mlp.unknown.weight"] = torch.empty(0, 5)
    return "model.layers.1.mlp.unknown.weight", "config.json"


def _reshape(t: dict[str, Tensor]) -> Facts:
    t["model.embed_tokens.weight"] = t["model.embed_tokens.weight"][:-1].clone()
    return "model.embed_tokens.weight", "(127, 128)", "(128, 128)"


def _quantized(t: dict[str, Tensor]) -> Facts:
    name = "model.layers.0.mlp.up_proj.weight"
    t[name] = t[name].to(torch.float8_e4m3fn)
    return name, "float8_e4m3fn", "quantization_config"


def _wider(t: dict[str, Tensor]) -> Facts:
    t["model.norm.weight"] = t["model.norm.weight"].float()
    return "model.norm.weight", "torch.float32", "torch.bfloat16"


def _nan(t: dict[str, Tensor]) -> Facts:
    t["lm_head.weight"][100, 3] = float("nan")
    return "lm_head.weight", 1


def _inf(t: dict[str, Tensor]) -> Facts:
    t["model.layers.2.mlp.experts.3.down_proj.weight"][0, 0] = float("inf")
    return "model.layers.2.mlp.experts.3.down_proj.weight", 1


def _cut_file(path: Path) -> None:
    data = path / "model-00002-of-00004.safetensors"
    data.write_bytes(data.read_bytes()[:-100])


def _corrupt_index(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    index.write_text(index.read_text()[:-100])


def _index_without_names(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": ["model.norm.weight"]}))


def _index_of_numbers(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": 5}}))


def _listed_twice(path: Path) -> None:
    index = path / "model.safetensors.index.json"
    name = next(iter(json.loads(index.read_text())["weight_map"]))
    first = f'"{name}": "model-00004-of-00004.safetensors", '
    index.write_text(index.read_text().replace('"weight_map": {', '"weight_map": {' + first))


def _two_checkpoints(path: Path) -> None:
    shutil.copyfile(path / "model-00002-of-00004.safetensors", path / "model.safetensors")


def _say(path: Path, changes: dict[str, object]) -> None:
    """In config.json."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def _number_for_names(path: Path) -> None:
    _say(path, {"architectures": 5})


def _words_for_numbers(path: Path) -> None:
    _say(path, {"num_hidden_layers": "two"})


def _word_for_a_table(path: Path) -> None:
    _say(path, {"rope_scaling": "yarn"})


def _twice(path: Path) -> None:
    shutil.copyfile(path / "model-00002-of-00004.safetensors", path / "model-00001-of-00004.safetensors")


def _other_config(path: Path) -> None:
    _say(path, {"moe_intermediate_size": 32})


def _fewer_layers(path: Path) -> None:
    _say(path, {"num_hidden_layers": 2})


@pytest.mark.parametrize(
    ("damage", "facts"),
    [
        (_cut_file, ("model-00002-of-00004.safetensors", 100)),
        (_corrupt_index, ("model.safetensors.index.json", "JSON")),
        (_index_without_names, ("weight_map",)),
        (_index_of_numbers, ("weight_map",)),
        (_listed_twice, ("model.safetensors.index.json", "JSON")),
        (_two_checkpoints, ("model.safetensors", "model.safetensors.index.json")),
        (_number_for_names, ("config.json", 5)),
        (_words_for_numbers, ("config.json", "num_hidden_layers", "two")),
        (_word_for_a_table, ("config.json", "deepseek")),
        (
            _twice,
            (
                "model.layers.1.mlp.experts.3.up_proj.weight",
                "model-00001-of-00004.safetensors",
                "model-00002-of-00004.safetensors",
            ),
        ),
        (_other_config, ("model.layers.1.mlp.experts.0.gate_proj.weight", "(64, 128)", "config.json", "(32, 128)")),
        (_fewer_layers, ("model.layers.2.input_layernorm.weight",)),
    ],
)
def test_a_damaged_directory_is_refused_and_leaves_nothing(
    damage: Callable[[Path], None], facts: Facts, hf_dir: Path, tmp_path: Path
) -> None:
    assert (hf_dir / "model-00002-of-00004.safetensors").exists()
    damage(hf_dir)
    with refuses(ValueError, *facts):
        to_megatron(hf_dir, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("damage", [_drop, _add, _add_empty, _reshape, _quantized, _wider, _nan, _inf])
def test_bad_checkpoint_is_refused_and_leaves_nothing(
    damage: Callable[[dict[str, Tensor]], Facts], tmp_path: Path
) -> None:
    tensors = random_tensors(HF)
    facts = damage(tensors)
    path = write_checkpoint(tmp_path / "hf", HF, tensors)
    with refuses(ValueError, *facts):
        to_megatron(path, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_existing_output_is_refused(hf_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with refuses(ValueError, tmp_path / "out"):
        to_megatron(hf_dir, tmp_path / "out")
