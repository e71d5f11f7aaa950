"""Law: weights that trainer ranks send to the ranks of servers are, bit for bit, those of the encoder, in every layout
and format; each server rank receives the bytes of its slices and no others; and a member that fails is named, the
version before is still served, and the next publication works.

Trainer ranks are processes without Megatron, whose shards are cut by hand (`weights/shards.py` has its law in
tests/laws/test_weight_round_trip.py); servers are embedded ones of one rank and of two, over gloo. Not covered: NCCL,
several machines; a whole run (tests/e2e).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quant.spec import QuantFormat, QuantSpec
from rollout.publish.publication import PublishTarget
from rollout.wire import endpoints
from rollout.wire.reshard.requests import LayoutReply
from tests.support.chosen import later
from tests.support.embedded_processes import ServerProcess, server_processes
from tests.support.published import FAMILIES, Published
from tests.support.refusals import check_refusal
from tests.support.resharded import BY_COLUMNS, WHOLE, Fault, trainer_ranks

HERE = "tests/rollout/publish/reshard/test_resharded_weights.py"
FORMATS: dict[str, QuantSpec | None] = {
    "bf16": None,
    "fp8": QuantSpec.of(QuantFormat.FP8, block=(8, 8)),  # shards end at blocks
    "fp8, large blocks": QuantSpec.of(QuantFormat.FP8),  # no shard does
    "int4": QuantSpec.of(QuantFormat.INT4, "all"),
    "nvfp4": QuantSpec.of(QuantFormat.NVFP4),
}
LAYOUTS = {"one": (), "tp2": ("--tp-size", "2"), "ep2": ("--tp-size", "2", "--ep-size", "2")}
# family, format, shards of the trainer, ranks of the server
FIRST = [("deepseek", "fp8", "tp", "ep2"), ("qwen_moe", "int4", "tp", "one")]
DIVISIBLE = [format for format in FORMATS if format != "fp8, large blocks"]  # over the ranks of a small model's server
CASES = [
    *FIRST,
    *(("deepseek", format, "tp", "tp2") for format in DIVISIBLE),
    *((family, "bf16", "ep", "tp2") for family in FAMILIES),
    *(("glm", format, "stages", "ep2") for format in DIVISIBLE),
    ("deepseek", "fp8, large blocks", "tp", "one"),
    ("glm", "fp8, large blocks", "stages", "one"),
    ("deepseek", "nvfp4", "ep", "one"),
    ("qwen_moe", "int4", "ep", "one"),
    ("kimi", "int4", "tp", "ep2"),
]


class Model(Published):
    """One family in one format of this file."""

    def __init__(self, family: str, format: str) -> None:
        super().__init__(family, "bf16")
        self.spec = FORMATS[format]

    def sliced(self, urls: list[str], **options: Any) -> PublishTarget:
        """A target in pieces of 20 kB."""
        options = {"bucket_bytes": 20_000} | options
        return self.target(urls, "reshard", **options)  # type: ignore[arg-type]


def served(url: str) -> tuple[str, dict[str, str]]:
    """The version and the checksums of whole tensors, of which copies on several ranks are compared."""
    version = httpx.get(url + endpoints.MODEL_INFO, trust_env=False).json()["weight_version"]
    sums = httpx.get(url + endpoints.CHECKSUM, trust_env=False, timeout=60).json()["ranks"][0]["checksums"]
    return version, sums


def slice_bytes(url: str, model: Model) -> list[int]:
    """Of each rank of a server: bytes of what it keeps of the encoder's tensors."""
    layout = LayoutReply.from_json(httpx.get(url + endpoints.WEIGHTS_LAYOUT, trust_env=False).json(), "layout")
    encoded, out = model.encoded(0), [0] * layout.ranks
    for held in layout.tensors:
        t = encoded[held.name]
        for rank, rows in enumerate(layout.rows[held.rows]):
            if rows is not None:
                out[rank] += (t[rows[0] : rows[1]] if t.dim() else t).nbytes
    return out


def cut_blocks(model: Model) -> set[str]:
    """Weights of which two tensor-parallel ranks hold halves that end inside a block."""
    if model.spec is None:
        return set()
    rows, columns = model.spec.block
    return {
        name
        for name, t in model.weights(0)
        if model.spec.covers(name, t.shape) and not name.endswith(WHOLE)
        if (t.shape[1] // 2 % columns if name.endswith(BY_COLUMNS) else len(t) // 2 % rows)
    }


@pytest.mark.parametrize("case", later(list(dict.fromkeys(CASES)), FIRST, HERE), ids=", ".join)
def test_every_rank_gets_its_slices_as_the_encoder_makes_them(case: tuple[str, ...], tmp_path: Path) -> None:
    family, format, shards, ranks = case
    model = Model(family, format)
    with (
        trainer_ranks(model.hf, shards) as trainer,
        server_processes(model.checkpoint(tmp_path / "hf"), 1, *LAYOUTS[ranks]) as (server,),
    ):
        trainer.connect(model.sliced([server.url]))
        for version, seed in enumerate((1, 2), 1):
            found = trainer.publish(version, seed)
            assert found.error == "" and served(server.url) == (str(version), model.sums(seed))
            assert found.received == [slice_bytes(server.url, model)]
            assert found.bytes == sum(found.received[0]) and 0 < found.pause_seconds <= found.seconds
        assert found.pieces > 2
    assert set(found.gathers) == (cut_blocks(model) if shards == "tp" else set())


@pytest.fixture(scope="module")
def model() -> Model:
    return Model("deepseek", "fp8")


@pytest.fixture(scope="module")
def two(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Servers of two ranks and of one."""
    path = model.checkpoint(tmp_path_factory.mktemp("two") / "hf")
    with server_processes(path, 1, *LAYOUTS["tp2"]) as first, server_processes(path, 1) as second:
        yield [*first, *second]


def all_serve(model: Model, two: list[ServerProcess], version: int, seed: int) -> bool:
    return [served(s.url) for s in two] == [(str(version), model.sums(seed))] * 2


@pytest.mark.long(beside="tests/rollout/publish/reshard/test_resharded_weights.py")
def test_a_member_that_hangs_or_dies_is_named_and_the_next_group_works(model: Model, two: list[ServerProcess]) -> None:
    """A server that is stopped, then a trainer rank that is killed."""
    urls = [s.url for s in two]
    with trainer_ranks(model.hf, "tp") as trainer:
        trainer.connect(model.sliced(urls, timeout_s=8.0))
        assert trainer.publish(1, 1).error == "" and all_serve(model, two, 1, 1)
        stopped = trainer.publish(2, 2, Fault(rank=0, pid=two[1].process.pid or 0, number=signal.SIGSTOP))
        two[1].send(signal.SIGCONT)
        check_refusal(stopped.error, 2, urls[1], unrecorded="how a connection ends differs")
        assert all_serve(model, two, 1, 1)
        assert trainer.publish(2, 2).error == "" and all_serve(model, two, 2, 2)
        killed = trainer.publish(3, 3, Fault(rank=1, pid=0))
        check_refusal(killed.error, 3, "trainer rank 1", unrecorded="gloo's words")
        assert all_serve(model, two, 2, 2)
    with trainer_ranks(model.hf, "ep") as trainer:  # in another layout
        trainer.connect(model.sliced(urls))
        assert trainer.publish(3, 3).error == "" and all_serve(model, two, 3, 3)


def test_failures_are_named_and_the_next_publication_works(model: Model, two: list[ServerProcess]) -> None:
    """Another model, a version that goes back, a shard that cannot be encoded, a server that is killed."""
    urls, last = [s.url for s in two], "model.layers.1.mlp.experts.7.down_proj.weight"
    with trainer_ranks(FAMILIES["qwen_moe"], "tp") as trainer:
        trainer.connect(model.sliced(urls))
        check_refusal(trainer.publish(4, 1).error, 4, urls[0], urls[1], "model")
        trainer.train(model.hf)
        trainer.connect(model.sliced(urls))
        assert trainer.publish(4, 1).error == "" and all_serve(model, two, 4, 1)
        check_refusal(trainer.publish(3, 2).error, 3, 4, urls[0])
        spoiled = trainer.publish(5, 2, Fault(rank=1, spoils=last))
        check_refusal(spoiled.error, 5, "trainer rank 1", last, "NaN")
        assert all_serve(model, two, 4, 1)
        assert trainer.publish(5, 2).error == "" and all_serve(model, two, 5, 2)
        dead = trainer.publish(6, 3, Fault(rank=1, pid=two[1].process.pid or 0))
        check_refusal(dead.error, 6, urls[1], unrecorded="how a connection ends differs")
        assert urls[0] not in dead.error and served(urls[0]) == ("5", model.sums(2))
        trainer.connect(model.sliced(urls[:1]))
        assert trainer.publish(6, 3).error == "" and served(urls[0]) == ("6", model.sums(3))
