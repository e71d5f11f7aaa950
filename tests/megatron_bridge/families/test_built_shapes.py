"""The published models' true shapes as stock megatron-core builds them: ranks of a layout of TP8 x PP8 x EP32, on the
meta device, hold every parameter of the family's table once, and ask a checkpoint for what the converter writes.

Each rank is built by the trainer's own `build_model` from the true config.json: all of the last pipeline stage, which
has the draft layer; of the first one, each tensor-parallel rank and the last rank; of those between, the first rank and
the last. What a rank must hold is worked out here by the rules of pipeline, tensor and expert parallelism; how tensors
are cut into pieces for that layout is the converter's own code. Not covered: TransformerEngine's modules
(test_te_stages.py), and values, which do not exist here (tests/laws/test_weight_round_trip.py, of small models).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bridge.config import ParallelConfig
from megatron_bridge.convert.directory.boxes import Box, Grid, boxes, extra_state_keys
from megatron_bridge.convert.directory.rank_reads import position, shares
from megatron_bridge.families.base import Entry, Split, TensorMap, Where
from megatron_bridge.families.registry import family_of
from megatron_bridge.weights import export as hf_export
from miles_like.types import NamedTensor
from quant.formats.codec import Codec
from quant.registry import codec_or_none
from quant.spec import CONVENTIONS, QuantSpec
from quant.stream import stored_name
from rollout.publish.buckets import cut, gathered
from tests.megatron_bridge.families.test_published_shapes import LAYOUTS, read, stages, whole
from tests.support.built_ranks import BuiltRank, Share, build_ranks
from tests.support.chosen import chosen, later
from tests.support.spawn import run_ranks

# in the order in which two processes take turns
MODELS = ("deepseek_v3", "kimi_k2", "glm45", "qwen3_235b_a22b", "qwen3_32b")
NAMES = later(MODELS, ("qwen3_32b",), beside="tests/megatron_bridge/families/test_built_shapes.py")


def layout_of(name: str) -> ParallelConfig:
    """With the data-parallel ranks that expert parallelism needs and no more: they would hold the same again."""
    layout = LAYOUTS[name]
    return ParallelConfig(**layout | {"dp": max(1, layout.get("ep", 1) // layout["tp"])})


def _chosen(layout: ParallelConfig) -> list[int]:
    """Ranks by number; those of a stage follow each other."""
    size = layout.tp * layout.dp
    stage = {0: [*range(layout.tp), size - 1], layout.pp - 1: [*range(size)]}
    return sorted({s * size + r for s in range(layout.pp) for r in stage.get(s, (0, size - 1))})


def _build(rank: int, world_size: int, port: int, names: list[str]) -> dict[str, list[BuiltRank]]:
    out = {}
    for name in names[rank::world_size]:
        layout = layout_of(name)
        out[name] = build_ranks(read(name), layout.model_dump(), _chosen(layout))
    return out


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> dict[str, list[BuiltRank]]:
    first, second = run_ranks(_build, 2, chosen(request, "name", MODELS), keep=True)
    return first | second


def _stage_of(name: str, tensors: TensorMap, entry: Entry, layer: int | None) -> int:
    layout = layout_of(name)
    if entry.where is Where.TOP:
        return 0 if entry.megatron.startswith("embedding.") else layout.pp - 1
    if entry.where is Where.MTP:
        return layout.pp - 1
    assert layer is not None
    return next(s for s, layers in enumerate(stages(layout, tensors.dims["layers"])) if layer in layers)


def _share_of(tensors: TensorMap, entry: Entry, layout: ParallelConfig) -> tuple[int, ...]:
    """Shape of the parameter on one rank."""
    rows, *columns = tensors.megatron_shape(entry)
    ranks = layout.etp if entry.per_expert else layout.tp
    if entry.split is Split.REPLICATED:
        return rows, *columns
    if entry.split is Split.ROW:
        return rows, columns[0] // ranks
    return rows // ranks, *columns


@functools.cache
def expected(name: str) -> list[dict[str, tuple[Entry, int | None]]]:
    """Stage -> name of each parameter with global numbers -> its line of the table and its expert, by the rules of
    pipeline parallelism. A last stage with draft layers holds the embedding again."""
    tensors, layout = whole(name), layout_of(name)
    out: list[dict[str, tuple[Entry, int | None]]] = [{} for _ in range(layout.pp)]
    for entry in tensors.entries:
        for layer in tensors.layers_of(entry):
            for e in range(tensors.experts_of(entry)):
                pattern, at = entry.megatron, _stage_of(name, tensors, entry, layer)
                parameter = pattern.format(i=layer, e=e, j=tensors.depth(layer))
                out[at][parameter] = entry, e if entry.per_expert else None
                if pattern.startswith("embedding.") and tensors.draft_layers:
                    out[-1][parameter] = entry, None
    return out


def _on_rank(name: str, rank: BuiltRank) -> dict[str, Entry]:
    local = whole(name).dims.get("experts", 0) // layout_of(name).ep
    mine = range(rank.ep * local, (rank.ep + 1) * local)
    return {n: entry for n, (entry, expert) in expected(name)[rank.pp].items() if expert is None or expert in mine}


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_are_those_of_the_layout(name: str, built: dict[str, list[BuiltRank]]) -> None:
    """Else what follows would be true of fewer."""
    layout = layout_of(name)
    places = [(rank.pp, rank.tp, rank.ep) for rank in built[name]]
    assert len(set(places)) == len(places) == len(_chosen(layout))
    for stage in range(layout.pp):
        tp, ep = ({place[axis] for place in places if place[0] == stage} for axis in (1, 2))
        assert tp == (set(range(layout.tp)) if stage in (0, layout.pp - 1) else {0, layout.tp - 1})
        assert ep == set(range(layout.ep)) if stage == layout.pp - 1 else {0, layout.ep - 1} <= ep


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_holds_its_share_of_the_table_and_nothing_else(name: str, built: dict[str, list[BuiltRank]]) -> None:
    """Each parameter and routing bias that megatron built is one line of the table with one layer and one expert, of
    the line's shape divided by its split, in the dtype that is stored; none is missing."""
    tensors, layout = whole(name), layout_of(name)
    for rank in built[name]:
        held = {parameter: (shape, dtype) for parameter, shape, dtype in rank.tensors}
        assert len(held) == len(rank.tensors)
        assert held == {
            parameter: (_share_of(tensors, entry, layout), tensors.dtype(entry))
            for parameter, entry in _on_rank(name, rank).items()
        }
        for parameter in itertools.islice(held, 0, None, 7):  # the table read the other way
            assert tensors.places_in(parameter)[0].megatron_name == parameter


@pytest.mark.parametrize("name", NAMES)
def test_the_ranks_together_have_the_published_number_of_elements(name: str, built: dict[str, list[BuiltRank]]) -> None:
    """The first rank of each stage, and what the stage's others hold of the same parameters: as many shares as
    the table's split says, on as many expert-parallel ranks. Parameters have a checkpoint tensor; megatron's sizes of
    all of those add up to the model too."""
    tensors, layout = whole(name), layout_of(name)
    firsts = [rank for rank in built[name] if rank.tp == rank.ep == 0]
    assert [rank.pp for rank in firsts] == list(range(layout.pp))
    seen: set[str] = set()
    count = 0
    for rank in firsts:
        for parameter, shape, _ in rank.tensors:
            entry = tensors.places_in(parameter)[0].entry
            divided = entry.split is not Split.REPLICATED
            ranks = layout.ep * (layout.etp if divided else 1) if entry.per_expert else layout.tp if divided else 1
            count += 0 if parameter in seen else math.prod(shape) * ranks
            seen.add(parameter)
    published = family_of(tensors.hf).parameter_count(tensors.hf, mtp=True)
    assert count == published
    whole_tensors = {share.key: share.shape for rank in built[name] for share in rank.shares}
    assert sum(map(math.prod, whole_tensors.values())) == published


@pytest.mark.parametrize("name", NAMES)
def test_the_stages_publish_every_tensor_once(name: str, built: dict[str, list[BuiltRank]]) -> None:
    """What the exporter makes of the built models, in which one local expert stands for one on each rank: but for the
    embedding, which a last stage with draft layers has again, no tensor is on two stages."""
    tensors, layout = whole(name), layout_of(name)
    found = Counter(slot for rank in built[name] if rank.tp == rank.ep == 0 for slot in rank.exported)
    wanted = Counter(
        (index, layer, e if entry.per_expert else None)
        for index, entry in enumerate(tensors.entries)
        for layer in tensors.layers_of(entry)
        for e in range(tensors.experts_of(entry) // (layout.ep if entry.per_expert else 1))
    )
    if tensors.draft_layers:
        wanted[next(i for i, e in enumerate(tensors.entries) if e.megatron.startswith("embedding.")), None, None] += 1
    assert found == wanted


# in which order they are published, and how that is divided into requests


class _Sized:
    """A stored tensor of which only the size is known."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Group:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def _published(name: str, built: list[BuiltRank], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The exporter's own order over all stages: each stage's slots as its first rank tells them to the others."""
    described = [rank.exported for rank in built if rank.tp == rank.ep == 0]
    monkeypatch.setattr(hf_export, "gather_objects", lambda mine, group: described)
    layout = layout_of(name)
    outside: Any = SimpleNamespace(
        **{f"{kind}_group": _Group(getattr(layout, kind), 0) for kind in ("tp", "ep")},
        etp_group=_Group(layout.etp, 0),
        pp_group=_Group(layout.pp, -1),  # the rank of no stage, so no values are asked for
    )
    hf = read(name)
    return list(hf_export.ExportPlan([], family_of(hf), hf, outside, mtp=True).names())


FORMATS = {
    "bf16": None,
    **{
        f"{f}-{convention}": QuantSpec.of(f, "all", convention=convention)
        for f, conventions in CONVENTIONS.items()
        for convention in conventions
    },
}
MIB = 1 << 20


@pytest.mark.parametrize("name", NAMES)
def test_what_an_engine_loads_at_once_is_sent_at_once(
    name: str, built: dict[str, list[BuiltRank]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of publication of the true shapes, in every format and for buckets of any size: all stored tensors
    of a weight (codes, scales) are in one request, and so are the two that stock SGLang concatenates while it
    handles one request. Which two is written here by its source, not by the table. Of routed experts, which are most
    of the names, the formats other than bf16 have the first two."""
    tensors = whole(name)
    order = _published(name, built[name], monkeypatch)
    assert len(order) == len(set(order)) == sum(1 + len(tensors.copies_of(p.entry)) for p in tensors.places())
    fused, divided, nothing = tensors.fused(), False, torch.empty(0)
    shapes = dict.fromkeys(order, (1,)) | {p.hf_name: p.shape for p in tensors.places()}
    few = [n for n in order if not re.search(r"\.experts\.(\d\d|[2-9])", n)]
    for spec in FORMATS.values():
        names, codec = order if spec is None else few, codec_or_none(spec)

        def stored(
            names: Sequence[str] = names, spec: QuantSpec | None = spec, codec: Codec | None = codec
        ) -> Iterator[tuple[str, Any]]:
            for n, _ in gathered((NamedTensor(n, nothing) for n in names), fused):
                if codec is not None and spec is not None and spec.covers(n, shapes[n]):
                    for leaf, (dtype, shape) in codec.layout(shapes[n], n).items():
                        yield stored_name(n, leaf), _Sized(math.prod(shape) * dtype.itemsize)
                else:
                    yield n, _Sized(2 * math.prod(shapes[n]))

        for size in (1, *(n * MIB for n in (64, 256, 1024) if spec is None or n == 256)):
            request = {t.name: i for i, part in enumerate(cut(stored(), size, fused)) for t in part}
            requests_of: dict[str, set[int]] = {}
            for n, number in request.items():
                unit = n if n.endswith("bias") else n.rpartition(".")[0]
                if tensors.dims.get("q_lora"):
                    unit = unit.replace("kv_a_proj_with_mqa", "q_a_proj")
                requests_of.setdefault(unit, set()).add(number)
            apart = [unit for unit, numbers in requests_of.items() if len(numbers) > 1]
            assert not apart, (spec, size, apart[:3])
            divided |= len(set(request.values())) > 100
    assert divided


# what a load asks for


def _written(tensors: TensorMap, layout: ParallelConfig, parameter: str) -> list[Box]:
    """The pieces that the converter writes of a parameter for this layout. They fill it."""
    places, grid = tensors.places_in(parameter), Grid(tp=layout.tp, etp=layout.etp)
    pieces = [box for place in places for box in boxes(place, tensors, grid, chunk_bytes=64 << 20)]
    assert sum(math.prod(box.sizes) for box in pieces) == math.prod(tensors.megatron_shape(places[0].entry))
    return pieces


def _inside(box: Box, share: Share) -> bool:
    """Raises AssertionError where the piece is on both sides of the share's edge."""
    spans = zip(box.offset, box.sizes, share.offset, share.sizes, strict=True)
    common = [min(a + n, b + m) - max(a, b) for a, n, b, m in spans]
    if min(common) <= 0:
        return False
    assert tuple(common) == box.sizes, (box, share)
    return True


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_asks_for_whole_pieces_that_the_converter_writes(name: str, built: dict[str, list[BuiltRank]]) -> None:
    """A parameter's part of the checkpoint is under the key, of the whole shape, of the dtype and in the expert's row
    that the converter gives it, and pieces fill it without being cut. Of the stages' ranks that are built, each piece
    is asked for by exactly one that megatron would have save it."""
    tensors, layout = whole(name), layout_of(name)
    written = functools.cache(functools.partial(_written, tensors, layout))
    saved: dict[str, Counter[int]] = {}
    for rank in built[name]:
        volumes = Counter[str]()
        for share in rank.shares:
            own = [i for i, box in enumerate(written(share.name)) if _inside(box, share)]
            size = sum(math.prod(written(share.name)[i].sizes) for i in own)
            assert size == math.prod(share.sizes), share
            for i in own:
                box = written(share.name)[i]
                assert (box.key, box.shape, box.dtype) == (share.key, share.shape, share.dtype)
            volumes[share.name] += size
            saved.setdefault(share.name, Counter()).update(own if share.main else ())
        assert volumes == {parameter: math.prod(shape) for parameter, shape, _ in rank.tensors}
    for parameter, pieces in saved.items():
        stage = min(s for s, names in enumerate(expected(name)) if parameter in names)
        every_rank = stage == layout.pp - 1 or (stage == 0 and ".experts." not in parameter)
        assert set(pieces.values()) == {1}
        assert len(pieces) == len(written(parameter)) or not every_rank, parameter


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_is_planned_to_read_what_it_asks_for(name: str, built: dict[str, list[BuiltRank]]) -> None:
    """The shares by which files are copied to a node are the boxes that megatron asks for, of each rank by number."""
    tensors, layout = whole(name), layout_of(name)
    for number, rank in zip(_chosen(layout), built[name], strict=True):
        at = position(layout, number)
        assert (at.pp, at.tp, at.ep) == (rank.pp, rank.tp, rank.ep)
        planned = Counter[tuple[str, tuple[int, ...], tuple[int, ...]]]()
        for key, entry, found in shares(tensors, layout, {at}):
            for share in found:
                rest = tensors.megatron_shape(entry)[1:]
                runs = [share.rows, *([share.columns] if share.columns else [(0, n) for n in rest[:1]])]
                for e in range(*share.experts):
                    box = [(e, e + 1), *runs] if entry.per_expert else runs
                    planned[key, tuple(a for a, _ in box), tuple(b - a for a, b in box)] += 1
        assert planned == Counter((share.key, share.offset, share.sizes) for share in rank.shares)


@pytest.mark.parametrize("name", NAMES)
def test_objects_beside_the_tensors_are_written_too(name: str, built: dict[str, list[BuiltRank]]) -> None:
    """Stock loading insists on them: one of each parallel linear that a rank holds, experts by their global numbers.
    Of latent attention's down projections, which are whole on each rank, only TransformerEngine asks for one."""
    tensors = whole(name)
    asked: set[str] = set().union(*(rank.objects for rank in built[name]))
    held = {parameter for rank in built[name] for parameter, *_ in rank.tensors}
    linears = {parameter for parameter in held if tensors.places_in(parameter)[0].entry.linear}
    assert asked <= set(extra_state_keys(tensors))
    assert len(asked) == len({parameter for parameter in linears if "_down_proj." not in parameter})
