"""Published checkpoints of up to a trillion parameters, planned in full: every offset that is read and written and
every rank's read list, over files with true names, shapes, dtypes and sizes that hold no data; and tensors of true
width, filled with random values, really dequantized, converted and staged within the memory limit.

Oracles: the numbers of elements that the hub's safetensors index has of each published checkpoint (those of
test_published_shapes.py), and a dequantization of blocks of 128 x 128 in plain torch, written here. The experts of a
layer are alike, so that usual cases convert one of them; the longest all of a layer: 384 of Kimi-K2.
"""

from __future__ import annotations

import io
import math
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_bridge.config import ParallelConfig
from megatron_bridge.convert.directory.boxes import Grid
from megatron_bridge.convert.directory.manifest import Fact, FileFact, Manifest, Piece
from megatron_bridge.convert.directory.rank_reads import bytes_read, files_read, pieces_read
from megatron_bridge.convert.source import Source
from megatron_bridge.convert.to_megatron import Conversion, plan_conversion
from megatron_bridge.convert.units import HashedFile
from megatron_bridge.families.registry import family_of
from megatron_bridge.plan.layout import check_layout
from miles_like.config.run import ModelConfig
from miles_like.config.sections.convert import ConvertConfig
from miles_like.pipeline.fetch import fetch, visible_files
from miles_like.storage.verified_copy import Copy, LocalSource, StageFiles
from quant.hf_config import spec_from_hf
from quant.stream import dequantize_stream
from tests.megatron_bridge.families.test_published_shapes import LAYOUTS
from tests.support.chosen import later
from tests.support.sparse_models import CONFIGS, fill, published_config, write_sparse

# some ten seconds each, though no process is started; small models are planned and converted there
pytestmark = pytest.mark.slow
HERE = "tests/megatron_bridge/convert/test_full_plans.py"
LONG = pytest.mark.long(beside=HERE)

# elements on the hub, draft layers and scales included; of Kimi-K2 56 elements a layer are not in the tables
PUBLISHED = {
    "deepseek_v3": 684_531_386_000,
    "kimi_k2": 1_026_470_731_056 - 61 * 56,
    "qwen3_235b_a22b": 235_093_634_560,
    "glm45": 358_337_791_296,
}
SHIPPED = {  # the cluster's configuration; none is shipped for GLM-4.5
    "deepseek_v3": "deepseek_v3_fp8.toml",
    "kimi_k2": "kimi_k2_int4_qat.toml",
    "qwen3_235b_a22b": "qwen3_235b_a22b.toml",
}
LIMIT = int(ConvertConfig().memory_limit_gib * (1 << 30))
MIB = 1 << 20
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # in a draft layer, of the model's


def layout_of(name: str) -> ParallelConfig:
    if name in SHIPPED:
        return ParallelConfig.model_validate(tomllib.loads((CONFIGS / SHIPPED[name]).read_text())["parallel"])
    return ParallelConfig(**LAYOUTS[name])


@contextmanager
def peak_rss_below(limit: int) -> Iterator[None]:
    """Linux: the high-water mark of this process's resident memory, reset before and read after."""
    Path("/proc/self/clear_refs").write_text("5")
    yield
    peak = int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
    assert peak < limit, f"{peak:,} bytes were resident at most"


def planned_manifest(job: Conversion) -> Manifest:
    """Of the job's output, but for checksums and the archives' framing; file `common.pt` stands for the small ones."""
    facts: dict[str, list[Any]] = {}
    for number in range(job.count):
        for b in job.units[number]:
            nbytes = math.prod(b.sizes) * b.dtype.itemsize
            fact = facts.setdefault(b.key, [str(b.dtype), b.shape, []])
            fact[2].append(Piece(job.file(number), 0, nbytes, "", b.offset, b.sizes))
    tensors = {key: Fact(dtype, shape, tuple(pieces)) for key, (dtype, shape, pieces) in facts.items()}
    names = [job.file(n) for n in range(job.count)] + ["common.pt"]
    return Manifest("torch_dist", tensors, {name: FileFact(1, "") for name in names})


def check_written_offsets(manifest: Manifest) -> int:
    """Pieces lie inside their tensors, begin at different offsets and have all their elements; returns the elements."""
    total = 0
    for key, fact in manifest.tensors.items():
        assert len({p.offset for p in fact.pieces}) == len(fact.pieces), key
        for p in fact.pieces:
            assert all(o >= 0 and o + n <= size for o, n, size in zip(p.offset, p.sizes, fact.shape, strict=True)), key
        assert sum(math.prod(p.sizes) for p in fact.pieces) == math.prod(fact.shape), key
        total += math.prod(fact.shape)
    return total


def check_read_offsets(job: Conversion) -> None:
    """Each source tensor is read once, row by row (or in slices of columns), from bytes that lie in its file."""
    read = Counter[str]()
    for unit in job.units:
        for b in unit:
            shape = job.source.shape(b.hf_name)
            assert 0 <= b.first < b.last <= shape[0]
            columns = b.columns or (0, math.prod(shape[1:]))
            read[b.hf_name] += (b.last - b.first) * (columns[1] - columns[0])
    for name, elements in read.items():
        assert elements == math.prod(job.source.shape(name)), name
        for info in job.source.stored(name):
            assert info.offset > 0 and info.offset + info.nbytes <= info.file.stat().st_size
    assert set(read) | set(job.skipped) == set(job.source.names())


@pytest.mark.parametrize("name", later(PUBLISHED, (), beside=HERE))
def test_a_published_checkpoint_is_planned_in_full(name: str, tmp_path: Path) -> None:
    hf = published_config(name)
    root, layout = write_sparse(tmp_path / "hf", hf), layout_of(name)
    check_layout(layout, hf)
    with peak_rss_below(2 << 30):
        assert fetch(ModelConfig(path=str(root)), tmp_path / "fetch", lambda _: None) == root
        source = Source.open(root)
        listed = {p.name: p.stat().st_size for p in visible_files(root)}
        data = sum(size for file, size in listed.items() if file.endswith(".safetensors"))
        assert 0 < data - source.hf.nbytes < 200 * len(source.hf.names())  # headers
        assert sum(math.prod(source.hf.info(n).shape) for n in source.hf.names()) == PUBLISHED[name]
        job = plan_conversion(source, Grid(layout.tp, layout.etp))
        manifest, tensors = planned_manifest(job), family_of(hf).bind(hf, mtp=True)
        check_read_offsets(job)
        elements = check_written_offsets(manifest)
        assert elements == family_of(hf).parameter_count(hf, mtp=True)
        whole = bytes_read(tensors, layout, range(layout.world_size))
        assert whole == sum(p.size for fact in manifest.tensors.values() for p in fact.pieces)
        seen: set[str] = set()
        for first in range(0, layout.world_size, 8):  # nodes of eight ranks
            node = range(first, first + 8)
            # ranks read whole pieces of the run's layout, and no byte beside them
            assert sum(p.size for p in pieces_read(manifest, tensors, layout, node)) == bytes_read(
                tensors, layout, node
            )
            files = files_read(manifest, tensors, layout, node)
            assert len(files) < len(manifest.files) / 2
            seen |= files
        one = layout.world_size // layout.pp  # a rank of the second stage, alone
        assert sum(p.size for p in pieces_read(manifest, tensors, layout, [one])) == bytes_read(tensors, layout, [one])
        assert set(manifest.files) <= seen


# true width, with data


class Width(NamedTuple):
    """Which tensors of a published model are converted. Bytes are in BF16, and lower bounds."""

    layers: tuple[int, ...]  # the first dense one, the first with experts, the last and the draft layer, as there are
    experts: int  # the layer whose routed experts are converted; those of the others are like them
    few: tuple[str, ...]  # names after "model.layers.", one or two of each kind of layer
    few_bytes: int
    whole_bytes: int  # of the layers


WIDTHS = {
    "deepseek_v3": Width(
        layers=(0, 3, 60, 61),
        experts=3,
        few=(
            "0.mlp.down_proj.weight",  # 18432 columns, in eight slices
            "0.input_layernorm.weight",
            "3.self_attn.kv_b_proj.weight",
            "3.mlp.gate.weight",
            "3.mlp.gate.e_score_correction_bias",
            *(f"3.mlp.experts.255.{part}_proj.weight" for part in ("gate", "up", "down")),
            "60.self_attn.q_b_proj.weight",
            "60.post_attention_layernorm.weight",
            "61.eh_proj.weight",
            "61.self_attn.kv_a_proj_with_mqa.weight",  # 576 rows: the last block has 64
            "61.enorm.weight",
        ),
        few_bytes=600 * MIB,
        whole_bytes=25 * 10**9,  # 22.5 GB are 256 experts
    ),
    "kimi_k2": Width(
        layers=(0, 1, 60),
        experts=1,
        few=(
            "0.mlp.down_proj.weight",
            "0.self_attn.kv_b_proj.weight",  # 64 heads
            "1.mlp.gate.weight",  # 384 rows
            "1.mlp.gate.e_score_correction_bias",
            *(f"1.mlp.experts.383.{part}_proj.weight" for part in ("gate", "up", "down")),
            "60.self_attn.q_b_proj.weight",
            "60.self_attn.kv_a_proj_with_mqa.weight",
            "60.post_attention_layernorm.weight",
        ),
        few_bytes=400 * MIB,
        whole_bytes=35 * 10**9,
    ),
    "qwen3_235b_a22b": Width(
        layers=(0, 93),
        experts=0,
        few=(
            "0.self_attn.q_proj.weight",  # 64 heads beside the 4 of the next two
            "0.self_attn.k_proj.weight",
            "0.self_attn.v_proj.weight",
            "0.self_attn.q_norm.weight",
            "0.mlp.gate.weight",
            *(f"0.mlp.experts.127.{part}_proj.weight" for part in ("gate", "up", "down")),
            "93.self_attn.o_proj.weight",
            "93.post_attention_layernorm.weight",
        ),
        few_bytes=150 * MIB,
        whole_bytes=5 * 10**9,
    ),
    "glm45": Width(
        layers=(0, 3, 91, 92),
        experts=3,
        few=(
            "0.mlp.down_proj.weight",
            "0.self_attn.q_proj.weight",
            "0.self_attn.q_proj.bias",
            "3.self_attn.k_proj.weight",
            "3.self_attn.v_proj.bias",
            "3.mlp.gate.weight",
            "3.mlp.gate.e_score_correction_bias",
            *(f"3.mlp.experts.159.{part}_proj.weight" for part in ("gate", "up", "down")),
            "3.mlp.shared_experts.up_proj.weight",
            "91.self_attn.o_proj.weight",
            "92.eh_proj.weight",
            "92.hnorm.weight",
        ),
        few_bytes=500 * MIB,
        whole_bytes=9 * 10**9,
    ),
}


def chosen_few(width: Width, name: str) -> bool:
    return name.removeprefix("model.layers.") in width.few


def of_whole_layers(width: Width, name: str) -> bool:
    """The layers but for the draft layer's copies, with the routed experts of one of them."""
    found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    if found is None or int(found[1]) not in width.layers or found[2] in COPIES:
        return False
    return int(found[1]) == width.experts or ".experts." not in name


def dequantized(source: Source, name: str) -> Tensor:
    """BF16 by the rule of the published checkpoints: each block of 128 x 128 codes times its scale, in FP32."""
    stored = [source.hf.read(info_name) for info_name in (name, f"{name}_scale_inv") if info_name in source.hf]
    if len(stored) == 1:
        return stored[0]
    codes, scales = stored
    rows, columns = codes.shape
    blown = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return (codes.float() * blown).to(torch.bfloat16)


def convert_chosen(tmp_path: Path, model: str, chosen: Callable[[Width, str], bool]) -> int:
    """Fill, convert, stage and dequantize the chosen tensors of a model; returns their bytes in BF16."""
    source, layout = Source.open(write_sparse(tmp_path / "hf", published_config(model))), layout_of(model)
    names = [n for n in source.names() if chosen(WIDTHS[model], n)]
    assert chosen is not chosen_few or len(names) == len(WIDTHS[model].few)
    for i, name in enumerate(names):
        for stored in source.stored(name):
            fill(stored, seed=i)
    out, total = tmp_path / "out", 0
    out.mkdir()
    with peak_rss_below(LIMIT):
        # units of single tensors, so that each of those with data has one file
        job = plan_conversion(source, Grid(layout.tp, layout.etp), unit_bytes=1)
    numbers = {job.units[n][0].hf_name: n for n in range(job.count)}
    for name in names:
        file = job.file(numbers[name])
        with peak_rss_below(LIMIT), HashedFile(out / file) as f:
            facts = job.write(numbers[name], f)
            done = f.finish()
        total += check_unit(job, numbers[name], facts, out)
        target, files = tmp_path / "node" / "megatron", {file: {"size": done.size, "sha256": done.sha256}}
        with peak_rss_below(LIMIT):
            staged = StageFiles(tmp_path / "node", (Copy(LocalSource(out), target, files),))()
        assert staged["copied_bytes"] == done.size
        (out / file).unlink(), (target / file).unlink()  # 25 GB of a layer would be on the disk twice
    check_dequantized(source, names[:: max(1, len(names) // 8)])
    return total


def check_unit(job: Conversion, number: int, facts: list[list[Any]], out: Path) -> int:
    """Each box of the file holds the values of the independent dequantization; returns its bytes."""
    (name,) = {box.hf_name for box in job.units[number]}
    wanted = dequantized(job.source, name)
    raw = (out / job.file(number)).read_bytes()
    for box, (start, size, _) in zip(job.units[number], facts, strict=True):
        found = torch.load(io.BytesIO(raw[start : start + size]))
        part = wanted[box.first : box.last]
        part = part if box.columns is None else part[:, slice(*box.columns)]
        assert found.dtype is box.dtype and torch.equal(found, part.to(box.dtype).reshape(box.sizes)), name
    return wanted.nbytes


def check_dequantized(source: Source, names: list[str]) -> None:
    """The stage that writes a BF16 directory gives the same, within the limit."""
    stored = [info_name for name in names for info_name in (name, f"{name}_scale_inv") if info_name in source.hf]
    pairs = ((n, source.hf.read(n)) for n in stored)
    with peak_rss_below(LIMIT):
        for name, value in dequantize_stream(pairs, spec_from_hf(source.hf.config), torch.bfloat16):
            assert torch.equal(value, dequantized(source, name)), name


@LONG
@pytest.mark.parametrize("model", WIDTHS)
def test_tensors_of_true_width_are_converted_within_the_memory_limit(model: str, tmp_path: Path) -> None:
    """One routed expert, and of each kind of layer one or two tensors."""
    assert convert_chosen(tmp_path, model, chosen_few) > WIDTHS[model].few_bytes


@LONG
@pytest.mark.parametrize("model", WIDTHS)
def test_whole_layers_are_converted_within_the_memory_limit(model: str, tmp_path: Path) -> None:
    assert convert_chosen(tmp_path, model, of_whole_layers) > WIDTHS[model].whole_bytes
