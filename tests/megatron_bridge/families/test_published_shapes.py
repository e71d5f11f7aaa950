"""The published models' true shapes, without memory: every parameter is mapped exactly once in both
directions, and the ranks of a large layout hold every element of it exactly once.

Oracles: the parameter counts of the hub's safetensors index, transformers' models on the meta device, and a division of
each parameter over the ranks that is written here by the rules of tensor, pipeline and expert parallelism, not by the
exporter's. Values of config.json are those of configs/*/config.json. Beside it: test_built_shapes.py has what megatron
itself builds at this size, tests/laws/test_weight_round_trip.py the bits of small models' shards.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.base import Entry, Precision, Split, TensorMap, Where
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.layout import check_layout
from quant.hf_config import spec_from_hf
from tests.support.tiny_models import transformers_model

ROOT = Path(__file__).parents[3] / "configs"
MODELS = ("deepseek_v3", "kimi_k2", "qwen3_235b_a22b", "qwen3_32b", "glm45")
# TP x PP x EP as large as the model's heads, layers and experts allow: Qwen3-235B has 4 key-value heads
LAYOUTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"tp": 8, "pp": 8, "dp": 8, "ep": 32, "first_stage_layers": 7, "last_stage_layers": 6},
    "kimi_k2": {"tp": 8, "pp": 8, "dp": 4, "ep": 32, "first_stage_layers": 7, "last_stage_layers": 6},
    "qwen3_235b_a22b": {"tp": 4, "pp": 8, "dp": 8, "ep": 32, "first_stage_layers": 11, "last_stage_layers": 11},
    "qwen3_32b": {"tp": 8, "pp": 8, "dp": 2},
    "glm45": {"tp": 8, "pp": 8, "dp": 8, "ep": 32, "first_stage_layers": 10, "last_stage_layers": 10},
}


def read(name: str) -> dict[str, Any]:
    hf: dict[str, Any] = json.loads((ROOT / name / "config.json").read_text())
    return hf


def whole(name: str) -> TensorMap:
    """With the draft layers."""
    hf = read(name)
    return family_of(hf).bind(hf, mtp=True)


def hub_counts(tensors: TensorMap) -> Counter[str]:
    """Elements by stored dtype, as the hub counts them: a draft layer's copies and the blocks' scales too."""
    spec, count = spec_from_hf(tensors.hf), Counter[str]()
    for entry in tensors.entries:
        times = len(tensors.layers_of(entry)) * tensors.experts_of(entry)
        for pattern, shape in zip(entry.hf, tensors.shapes(entry), strict=True):
            size = times * math.prod(shape)
            if spec is not None and spec.covers(pattern.format(i=1, e=0), shape):
                count["fp8"] += size
                count["scales"] += times * math.prod(-(-n // 128) for n in shape)
            else:
                dtype = "fp32" if entry.precision is Precision.FP32 else "bf16"
                count[dtype] += size * (1 + len(tensors.copies_of(entry)))
    return count


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("deepseek_v3", 684_531_386_000),  # with the draft layer and the scales
        ("qwen3_235b_a22b", 235_093_634_560),
        ("qwen3_32b", 32_762_123_264),
        ("glm45", 358_337_791_296),  # with the draft layer, its embedding and its head
    ],
)
def test_elements_are_those_of_the_published_checkpoint(name: str, published: int) -> None:
    assert hub_counts(whole(name)).total() == published


def test_size_of_kimi_k2() -> None:
    """The hub counts 1,026,408,235,864 without the scales (Kimi-K2-Instruct) and 1,026,470,731,056 with them
    (Kimi-K2-Base): both are 56 elements a layer more than the weights here, too few for a row of any of them."""
    counts = hub_counts(whole("kimi_k2"))
    assert 1_026_408_235_864 - (counts.total() - counts["scales"]) == 61 * 56
    assert 1_026_470_731_056 - counts.total() == 61 * 56


def test_draft_layer_of_glm45() -> None:
    """The names that the published checkpoint has for it, DeepSeek-V3's but for the attention."""
    tensors, at = whole("glm45"), "model.layers.92."
    ffn = [f"{half}_proj.weight" for half in ("gate", "up", "down")]
    own = {
        *(f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
        *(f"{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")),
        *(f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")),
        *(f"self_attn.{name}.weight" for name in ("q_norm", "k_norm", "o_proj")),
        *("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
        *(f"mlp.shared_experts.{name}" for name in ffn),
        *(f"mlp.experts.{e}.{name}" for e in range(160) for name in ffn),
    }
    assert {p.hf_name for p in tensors.places() if p.depth is not None} == {at + name for name in own}
    copies = [name for entry in tensors.entries for name in tensors.copies_of(entry)]
    assert copies == [at + "embed_tokens.weight", at + "shared_head.head.weight"]


@pytest.mark.parametrize("name", MODELS)
def test_elements_are_those_of_transformers(name: str) -> None:
    """transformers' own model of the config, on the meta device; it has no draft layer."""
    hf = read(name)
    with torch.device("meta"):
        model = transformers_model(hf)
    assert sum(x.numel() for x in model.state_dict().values()) == family_of(hf).parameter_count(hf)


@pytest.mark.parametrize("name", MODELS)
def test_every_name_goes_both_ways(name: str) -> None:
    """Each Hugging Face tensor has one place and one part in one Megatron parameter, whose parts are all there. All
    names are counted; of the experts, the first and the last are also looked up by pattern."""
    tensors = whole(name)
    last = tensors.dims.get("experts", 0) - 1
    hf_names: set[str] = set()
    parts: Counter[tuple[str, int]] = Counter()
    for place in tensors.places():
        assert place.hf_name not in hf_names, place.hf_name
        hf_names.add(place.hf_name)
        parts[place.megatron_name, len(place.entry.hf)] += 1
        if place.expert in (None, 0, last):
            assert tensors.place_of(place.hf_name) == place
            assert tensors.places_in(place.megatron_name)[place.index] == place
    assert all(count == wanted for (_, wanted), count in parts.items())


# the division over ranks, by hand


def stages(config: ParallelConfig, layers: int) -> list[range]:
    """Layers of each pipeline stage: the first and the last as configured, the rest evenly."""
    first, last = config.first_stage_layers, config.last_stage_layers
    between = layers - (first or 0) - (last or 0)
    even = between // (config.pp - (first is not None) - (last is not None))
    sizes = [even] * config.pp
    sizes[0], sizes[-1] = first or even, last or even
    ends = [sum(sizes[:i]) for i in range(config.pp + 1)]
    return [range(a, b) for a, b in itertools.pairwise(ends)]


def rows_of(tensors: TensorMap, entry: Entry, rank: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(part, first row, last row) of each Hugging Face tensor that tensor-parallel `rank` of `size` holds."""
    shapes = tensors.shapes(entry)
    if entry.split is Split.QKV:  # whole groups of query heads with their key and value head
        groups = tensors.dims["kv_heads"] // size
        for part, shape in enumerate(shapes):
            step = shape[0] // tensors.dims["kv_heads"]
            yield part, rank * groups * step, (rank + 1) * groups * step
        return
    for part, shape in enumerate(shapes):
        axis = 1 if entry.split is Split.ROW else 0
        if entry.split is Split.REPLICATED:
            yield part, 0, shape[0]
        else:
            assert shape[axis] % size == 0, (entry.megatron, shape, size)
            yield part, rank * shape[axis] // size, (rank + 1) * shape[axis] // size


def held(tensors: TensorMap, entry: Entry, rank: int, size: int) -> int:
    """Elements of one Megatron parameter on a rank, from its megatron shape."""
    shape = tensors.megatron_shape(entry)
    return math.prod(shape) if entry.split is Split.REPLICATED else math.prod(shape) // size


@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_a_large_layout_hold_every_element_once(name: str) -> None:
    """Each row (or column) of each tensor is on exactly one tensor-parallel rank, each expert on one expert-parallel
    rank, each layer on one stage; whole tensors are on all. Added up over the ranks, the model is what the table
    counts. The layout is one that the check before the start accepts."""
    hf, tensors = read(name), whole(name)
    config = ParallelConfig(**LAYOUTS[name])
    check_layout(config, hf)
    stage_of = {i: s for s, layers in enumerate(stages(config, hf["num_hidden_layers"])) for i in layers}
    assert sorted(stage_of) == list(range(hf["num_hidden_layers"]))
    experts = tensors.dims.get("experts", 0)
    by_stage: Counter[int] = Counter()
    for entry in tensors.entries:
        size = config.etp if entry.per_expert else config.tp
        ranges: dict[int, list[tuple[int, int]]] = {}
        for rank in range(size):
            for part, first, last in rows_of(tensors, entry, rank, size):
                ranges.setdefault(part, []).append((first, last))
        for part, shape in enumerate(tensors.shapes(entry)):
            length = shape[1] if entry.split is Split.ROW else shape[0]
            spans = sorted(ranges[part])
            if entry.split is Split.REPLICATED:
                assert set(spans) == {(0, length)}
            else:
                assert [a for a, _ in spans] == [0, *(b for _, b in spans[:-1])] and spans[-1][1] == length
        copies = size if entry.split is not Split.REPLICATED else 1
        on_ranks = sum(held(tensors, entry, rank, size) for rank in range(copies))
        per_layer = on_ranks * (experts if entry.per_expert else 1)
        for layer in tensors.layers_of(entry):
            top = 0 if entry.megatron.startswith("embedding") else config.pp - 1  # as the draft layers
            by_stage[top if entry.where in (Where.TOP, Where.MTP) else stage_of[layer]] += per_layer  # type: ignore[index]
    if experts:
        local = experts // config.ep
        assert sorted(r * local + e for r in range(config.ep) for e in range(local)) == list(range(experts))
    assert set(by_stage) == set(range(config.pp))
    assert sum(by_stage.values()) == family_of(hf).parameter_count(hf, mtp=True)
