"""A publication on disk that several ranks write is the one that a single rank writes, tensor for tensor.

Ranks are publishers of one process, one after the other or in threads. Not covered: ranks that gather the weights
(tests/laws/test_turns.py), servers that load them (tests/rollout/embedded/model/test_quantized_weights.py).
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from miles_like.hf.checkpoint import HFCheckpoint, write_hf
from miles_like.hf.merged import join_parts
from miles_like.types import NamedTensor, PublishReport
from quant.registry import make_codec
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.directory.shares import Shares
from rollout.publish.publication import PublishTarget
from rollout.wire import endpoints
from tests.support.fakes import FakeServer
from tests.support.refusals import refuses

FORMATS = (None, QuantFormat.FP8, QuantFormat.INT4, QuantFormat.NVFP4)


def spec_of(format: QuantFormat | None) -> QuantSpec | None:
    return None if format is None else QuantSpec(format=format)


def weights(seed: int = 0) -> list[NamedTensor]:
    """Three layers of two experts, of matrices and vectors."""
    g = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).bfloat16()

    out = [NamedTensor("model.embed_tokens.weight", made(64, 128))]
    for i in range(3):
        at = f"model.layers.{i}."
        out += [NamedTensor(at + f"self_attn.{p}_proj.weight", made(128, 128)) for p in "qkvo"]
        for e in range(2):
            out += [
                NamedTensor(at + f"mlp.experts.{e}.{p}_proj.weight", made(128, 128)) for p in ("gate", "up", "down")
            ]
        out.append(NamedTensor(at + "input_layernorm.weight", made(128)))
    return out


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (source := tmp_path / "source").mkdir()
    (source / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text('{"of": "the model"}')
    return source


def publishers(
    ranks: int, url: str, source: Path, spec: QuantSpec | None, parts_s: float = 30.0, **more: Any
) -> list[DiskPublisher]:
    config = PublishConfig(path="disk", parts_timeout_s=parts_s)
    target = PublishTarget(urls=(url,), kind="embedded", spec=spec, config=config, timeout_s=30.0, **more)
    shared = SharedDirectory(path=source.parent / "published", hf_config={"model_type": "x"}, copy_from=source)
    return [DiskPublisher(target, shared, rank=i, ranks=ranks) for i in range(ranks)]


def published(them: Sequence[DiskPublisher], version: int, seed: int = 0) -> PublishReport:
    """Rank 0, which waits for the others, is asked first."""
    with ThreadPoolExecutor(len(them)) as pool:
        reports = list(pool.map(lambda p: p.publish(weights(seed), version=version), them))
    return reports[0]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_its_tensors_are_those_of_one_writer(ranks: int, format: QuantFormat | None, source: Path) -> None:
    spec = spec_of(format)
    want = dict(quantize_stream(weights(), spec))
    with FakeServer() as server:
        report = published(publishers(ranks, server.url, source, spec), 1)
        assert dict(server.weights).keys() == want.keys()
    path = source.parent / "published" / "version_1"
    found = HFCheckpoint(path)
    assert sorted(found.names()) == sorted(want)
    for name, tensor in want.items():
        assert torch.equal(found.read(name).view(torch.uint8), tensor.contiguous().view(torch.uint8)), name
    assert report.bytes == found.nbytes == sum(t.nbytes for t in want.values())
    assert json.loads((path / "tokenizer.json").read_text()) == {"of": "the model"}
    assert [p.name for p in path.parent.iterdir()] == ["version_1"]


@pytest.mark.parametrize("format", FORMATS)
def test_shares_are_equal_in_bytes_and_keep_weights_of_one_scale_together(format: QuantFormat | None) -> None:
    spec, stream = spec_of(format), weights()
    parts = [list(Shares(3, spec).of(i, stream)) for i in range(3)]
    assert Counter(n for part in parts for n, _ in part) == Counter(n for n, _ in stream)
    sizes = [sum(t.nbytes for _, t in part) for part in parts]
    assert max(sizes) - min(sizes) <= 2 * max(t.nbytes for _, t in stream)
    shares = Shares(3, spec)
    owners = {n: shares.owner(n, t) for n, t in stream}
    assert [{n for n, _ in part} for part in parts] == [{n for n in owners if owners[n] == i} for i in range(3)]
    if spec is not None:
        codec = make_codec(spec)
        for name, tensor in stream:
            if spec.covers(name, tensor.shape):
                assert len({owners[n] for n in codec.bundle_of(name)}) == 1


def test_a_weight_that_no_rank_wrote_is_named(source: Path) -> None:
    """As where the ranks' streams differed at their end."""
    shares, stream = Shares(2, None), weights()
    owners = [shares.owner(n, t) for n, t in stream]
    lost = sorted(w.name for w, owner in zip(stream[-4:], owners[-4:], strict=True) if owner)
    with FakeServer() as server, ThreadPoolExecutor(1) as pool:
        first, second = publishers(2, server.url, source, None)
        pool.submit(second.publish, stream[:-4], version=1)
        with refuses(RuntimeError, 2, lost[0], len(lost)):
            first.publish(stream, version=1)
        assert endpoints.PAUSE not in server.endpoints()


def test_a_tensor_of_a_module_that_has_others_is_named_and_so_is_another_shape(tmp_path: Path) -> None:
    """A scale beside its codes, a bias beside its weight: of each module something is there."""
    spec, stream = spec_of(QuantFormat.FP8), weights()
    shares = Shares(2, spec)
    for name, tensor in stream:
        shares.owner(name, tensor)
    stored = dict(quantize_stream(stream, spec))
    scale = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"
    cases = {
        "short": ({n: x for n, x in stored.items() if n != scale}, (2, scale, 1)),
        "long": (
            stored | {"model.layers.0.input_layernorm.bias": torch.zeros(2)},
            (2, "model.layers.0.input_layernorm.bias", 1),
        ),
        "other": (stored | {"model.layers.2.input_layernorm.weight": torch.zeros(64)}, (64, 128, "torch.bfloat16")),
    }
    for name, (tensors, facts) in cases.items():
        write_hf(tmp_path / name, tensors.items(), {"model_type": "x"}, copy_from=None)
        with refuses(RuntimeError, *facts):
            shares.check_whole(HFCheckpoint(tmp_path / name))
    write_hf(tmp_path / "whole", stored.items(), {"model_type": "x"}, copy_from=None)
    shares.check_whole(HFCheckpoint(tmp_path / "whole"))


def test_a_part_that_does_not_come_is_named_and_nothing_is_sent(source: Path) -> None:
    with FakeServer() as server:
        first, *_ = publishers(3, server.url, source, None, parts_s=0.2)
        with refuses(RuntimeError, "1, 2", "published", 0.2, "publish.parts_timeout_s"):
            first.publish(weights(), version=1)
        assert endpoints.PAUSE not in server.endpoints()


def test_a_server_that_joins_loads_what_the_others_have_loaded(source: Path) -> None:
    """A version that is published once more is written beside what servers may still read; the one that joins makes no
    third, and removes nothing."""
    directory = source.parent / "published"
    with FakeServer() as server, FakeServer() as late:
        them = publishers(2, server.url, source, None)
        for _ in range(2):
            published(them, 1)
        assert [p.name for p in directory.iterdir()] == ["version_1.1"]
        report = published(publishers(2, late.url, source, None, joins=True), 1)
        (_, body) = next(call for call in late.calls if call[0] == endpoints.UPDATE_FROM_DISK)
        assert Path(body["model_path"]) == directory / "version_1.1"
        assert [p.name for p in directory.iterdir()] == ["version_1.1"]
        assert report.bytes == sum(t.nbytes for _, t in weights())
        assert dict(late.weights).keys() == dict(server.weights).keys()
        published(publishers(2, late.url, source, None, joins=True), 2)  # there is no such version yet
        assert [p.name for p in directory.iterdir()] == ["version_2"]


def test_parts_of_a_run_that_was_killed_are_not_taken(source: Path) -> None:
    """Rank 1's part of the version is there, whole, of other weights; and the version, of rank 0."""
    with FakeServer() as server:
        them = publishers(2, server.url, source, None)
        first = published(them, 1, seed=5)
        left = source.parent / "published"
        shutil.copytree(left / "version_1", left / "version_2.part1")
        shutil.copytree(left / "version_1", left / "version_2")  # a server may read it
        with ThreadPoolExecutor(2) as pool:  # rank 1 begins first, as where the weights are gathered together
            second = pool.submit(them[1].publish, weights(), version=2)
            report = them[0].publish(_after(second, weights()), version=2)
        assert first.bytes == report.bytes
        for name, tensor in weights():
            assert torch.equal(HFCheckpoint(left / "version_2.1").read(name), tensor), name


def _after(done: Any, stream: list[NamedTensor]) -> Any:
    done.result(timeout=30)
    yield from stream


def test_a_tensor_in_two_parts_is_refused(tmp_path: Path, source: Path) -> None:
    with FakeServer() as server:
        for name in ("a", "b"):
            (pub,) = publishers(1, server.url, source, None)
            pub.publish(weights(), version=1)
            shutil.move(source.parent / "published" / "version_1", tmp_path / name)
    with refuses(ValueError, "model.embed_tokens.weight", "a", "b"):
        join_parts([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
