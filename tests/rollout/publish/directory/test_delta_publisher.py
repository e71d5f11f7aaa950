"""Law: what a server holds after a publication of differences is what a whole publication gives, bit for bit; a server
that cannot take the differences goes on serving what it has, and the next publication reaches it.

Why it must hold: the trainer computes with weights that the servers are believed to hold, and each difference builds on
the one before. Servers are those of the embedded engine, in threads; trainer ranks are publishers in threads. Not
covered: real steps (tests/laws/test_published_deltas.py); damaged bytes one by one (tests/rollout/wire/test_deltas.py).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from miles_like.config.load import load_config
from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.types import NamedTensor, PublishReport
from quant.hf_config import quantized_config
from quant.spec import QuantFormat, QuantSpec
from quant.stream import quantize_stream
from rollout.config import PublishConfig
from rollout.embedded.server.service import Service
from rollout.publish.directory.delta_publisher import DeltaPublisher
from rollout.publish.directory.disk_publisher import SharedDirectory
from rollout.publish.publication import PublishTarget
from rollout.publish.servers import ServerSet
from rollout.wire import endpoints
from rollout.wire.checksum import tensor_checksum
from rollout.wire.control import UpdateFromDisk
from tests.support.embedded_fixtures import oracle, run, save, served, service, spec
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow  # its servers and encodings take half a minute of `make check`

Tensors = dict[str, torch.Tensor]
FORMATS = {
    "bf16": None,
    "fp8": QuantSpec(format=QuantFormat.FP8, block=(16, 16)),
    "int4": QuantSpec.of(QuantFormat.INT4),
}


class Model:
    """A served checkpoint and later versions of its weights, in each of which a few elements have changed."""

    def __init__(self, where: Path, how: QuantSpec | None) -> None:
        self.where, self.how = where, how
        plain = load_file(save(oracle(0), where / "plain") / "model.safetensors")
        self.plain = {n: t if n.endswith("bias") else t.to(torch.bfloat16) for n, t in plain.items()}
        config = json.loads((where / "plain" / "config.json").read_text())
        self.hf = quantized_config(config, how, list(self.plain))
        self.path = self.written("hf", self.encoded(0))

    def weights(self, version: int) -> list[NamedTensor]:
        return [NamedTensor(n, self._stepped(n, t, version)) for n, t in self.plain.items()]

    def _stepped(self, name: str, tensor: torch.Tensor, version: int) -> torch.Tensor:
        """Router biases are frozen; of the rest, one element in fifty."""
        out = tensor.clone()
        if "bias" not in name:
            for v in range(1, version + 1):
                g = torch.Generator().manual_seed(v)
                out.view(-1)[torch.rand(out.numel(), generator=g) < 0.02] *= 1.01
        return out

    def encoded(self, version: int) -> Tensors:
        return dict(quantize_stream(self.weights(version), self.how))

    def written(self, name: str, tensors: Tensors) -> Path:
        (path := self.where / name).mkdir()
        (path / "config.json").write_text(json.dumps(self.hf))
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return path

    def sums(self, version: int) -> dict[str, str]:
        return {n: tensor_checksum(n, t) for n, t in self.encoded(version).items()}


class Trainer:
    """Publishers of all ranks to some servers."""

    def __init__(
        self, model: Model, urls: list[str], ranks: int = 2, kind: type[DeltaPublisher] = DeltaPublisher
    ) -> None:
        target = PublishTarget(
            urls=tuple(urls), kind="embedded", spec=model.how, config=PublishConfig(path="delta"), timeout_s=20.0
        )
        self.directory = model.where / "published"
        shared = SharedDirectory(path=self.directory, hf_config=model.hf, copy_from=None)
        self.model, self.ranks = model, [kind(target, shared, rank=i, ranks=ranks) for i in range(ranks)]

    def publish(self, version: int, of: int | None = None) -> PublishReport:
        """of: the version of the weights, if it is another."""
        weights, begun = self.model.weights(version if of is None else of), Barrier(len(self.ranks))

        def stream() -> Iterator[NamedTensor]:
            """No rank has a tensor before all have begun, as where they are gathered together."""
            begun.wait(20)
            yield from weights

        with ThreadPoolExecutor(len(self.ranks)) as pool:
            reports = list(pool.map(lambda rank: rank.publish(stream(), version=version), self.ranks))
        return reports[0]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    made: dict[str, Model] = {}

    def of(name: str) -> Model:
        if name not in made:
            made[name] = Model(tmp_path_factory.mktemp(name), FORMATS[name])
        return made[name]

    return of


@pytest.fixture
def model(models: Callable[[str], Model]) -> Iterator[Model]:
    yield (model := models("fp8"))
    shutil.rmtree(model.where / "published", ignore_errors=True)


def answer(s: Service) -> list[int]:
    done = run(s.engine, spec([4, 50, 60, 7], temperature=0.0, max_new_tokens=16))[0][0]
    return list(done.reply.output_ids)


def is_difference(path: Path) -> bool:
    return "delta" in HFCheckpoint(path).config


@pytest.mark.parametrize("name", FORMATS)
def test_servers_hold_the_bits_of_each_version(models: Callable[[str], Model], name: str) -> None:
    """Two servers, two ranks: a whole publication, then differences; the bytes are those of the files."""
    model, found = models(name), []
    a, b = service(model.path), service(model.path, weights="codes")
    with served(a) as first, served(b) as second:
        trainer = Trainer(model, [first, second])
        for version in (1, 2, 3):
            report = trainer.publish(version)
            want = model.sums(version)
            assert a.store.checksums() == want and b.store.checksums() == want
            assert report.checksums == (want,)
            assert (a.engine.version, b.engine.version, a.engine.paused) == (str(version), str(version), False)
            path = trainer.directory / f"{'difference' if version > 1 else 'version'}_{version}"
            assert is_difference(path) == (version > 1)
            found.append((report.bytes, HFCheckpoint(path).nbytes, report.whole_bytes))
        assert sum(rank.base.nbytes for rank in trainer.ranks) == found[0][0], "the base is held once, over the ranks"
        left = sorted(p.name for p in trainer.directory.iterdir())
    whole = sum(t.nbytes for t in model.encoded(1).values())
    assert found[0] == (whole, whole, whole)
    assert all(sent == there < 0.4 * whole and of == whole for sent, there, of in found[1:])
    assert left == ["difference_3", "difference_3.against", "version_1"]
    assert answer(a) == answer(service(model.written("third", model.encoded(3)))), "they are computed with"


class Damaging(DeltaPublisher):
    """Something happens to the differences, or to a server, before the servers are asked."""

    damage: Callable[[Path], None]

    def _prepare(self, servers: ServerSet, request: UpdateFromDisk) -> None:
        type(self).damage(Path(request.model_path))
        super()._prepare(servers, request)


def _flip(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[0]
    at = HFCheckpoint(path).info("model.norm.weight")
    raw = bytearray(at.file.read_bytes())
    raw[at.offset + at.nbytes - 1] ^= 1
    at.file.write_bytes(raw)
    assert file.exists()


def _truncate(path: Path) -> None:
    file = sorted(path.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-10])


def _lose(path: Path) -> None:
    """A tensor, where all else is right."""
    index = path / "model.safetensors.index.json"
    files = {n: load_file(path / n) for n in sorted(set(json.loads(index.read_text())["weight_map"].values()))}
    named = {n: t for tensors in files.values() for n, t in tensors.items() if n != "model.norm.weight"}
    for name in files:
        (path / name).unlink()
    index.unlink()
    save_file(named, path / "model.safetensors")


def _other_base(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["delta"]["base"] = "7"
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "fact"),
    [(_flip, "model.norm.weight"), (_truncate, "difference_2"), (_lose, "model.norm.weight"), (_other_base, "7")],
)
def test_a_difference_that_is_refused_leaves_the_version_before(
    model: Model, damage: Callable[[Path], None], fact: str
) -> None:
    """Of two servers one reads them before the damage, so that it could change."""
    a, b = service(model.path), service(model.path)
    with served(a) as first, served(b) as second:
        trainer = Trainer(model, [first, second], kind=Damaging)
        trainer.publish(1)
        Damaging.damage = staticmethod(damage)
        with refuses(RuntimeError, first, second, fact, 2, 1):
            trainer.publish(2)
        for s in (a, b):
            assert s.store.checksums() == model.sums(1) and s.engine.version == "1"
            assert not s.engine.paused and not s.engine.refusal
        assert httpx.get(first + endpoints.MODEL_INFO).json()["weight_version"] == "1"
        report = trainer.publish(2)
        assert report.bytes == report.whole_bytes and a.store.checksums() == b.store.checksums() == model.sums(2)
        Damaging.damage = staticmethod(lambda path: None)
        report = trainer.publish(3)
        assert report.whole_bytes and report.bytes < report.whole_bytes
        assert a.store.checksums() == b.store.checksums() == model.sums(3)


def test_one_server_that_refuses_keeps_all_at_the_version_before(model: Model) -> None:
    """It holds other values under the same version: the hashes show it."""
    a, b = service(model.path), service(model.path)
    with served(a) as first, served(b) as second:
        trainer = Trainer(model, [first, second])
        trainer.publish(1)
        b.begin_update()
        b.update([NamedTensor("model.norm.weight", torch.ones(64).bfloat16())], flush_cache=False, version="1")
        b.end_update()
        held = b.store.checksums()
        with refuses(RuntimeError, second, "model.norm.weight", 2, 1) as caught:
            trainer.publish(2)
        assert first not in str(caught.value)
        assert a.store.checksums() == model.sums(1) and b.store.checksums() == held
        trainer.publish(2)
        assert a.store.checksums() == b.store.checksums() == model.sums(2)


def _refuse(s: Service) -> None:
    """To replace its weights by those that it has prepared."""

    def refusing(path: Path, *, flush_cache: bool, version: str | None) -> None:
        raise ValueError("no room for a thread")

    s.load_delta = refusing  # type: ignore[method-assign]


@pytest.mark.parametrize(("at", "both"), [(2, False), (3, True)])
def test_weights_that_are_not_replaced_after_the_pause(model: Model, at: int, both: bool) -> None:
    """A server that has replaced its weights loads the directory of those before, and all serve these. There is one
    until the first difference is served; without it no server may have replaced its weights."""
    a, b = service(model.path), service(model.path)
    with served(a) as first, served(b) as second:
        trainer = Trainer(model, [first, second])
        for version in range(1, at):
            trainer.publish(version)
        kept = [(s, s.load_delta) for s in ((a, b) if both else (b,))]
        for s, _ in kept:
            _refuse(s)
        with refuses(RuntimeError, second, "no room for a thread", at, "the previous version"):
            trainer.publish(at)
        for s in (a, b):
            assert s.store.checksums() == model.sums(at - 1) and s.engine.version == str(at - 1)
            assert not s.engine.paused
        for s, load in kept:
            s.load_delta = load  # type: ignore[method-assign]
        report = trainer.publish(at)
        assert report.bytes == report.whole_bytes and a.store.checksums() == b.store.checksums() == model.sums(at)


def test_servers_of_two_versions_stay_paused(model: Model) -> None:
    """One has replaced its weights by a second difference, and no directory has those before."""
    a, b = service(model.path), service(model.path)
    with served(a) as first, served(b) as second:
        trainer = Trainer(model, [first, second])
        for version in (1, 2):
            trainer.publish(version)
        _refuse(b)
        with refuses(RuntimeError, second, "paused", "--resume", 3):
            trainer.publish(3)
        assert a.engine.paused and b.engine.paused
        report = trainer.publish(3)
        assert report.bytes == report.whole_bytes and not a.engine.paused and not b.engine.paused
        assert a.store.checksums() == b.store.checksums() == model.sums(3)


def test_a_server_that_dies_before_the_pause_leaves_the_others_serving(model: Model) -> None:
    a, b = service(model.path), service(model.path)
    with served(a) as first, ExitStack() as dying:
        second = dying.enter_context(served(b))

        class Dying(DeltaPublisher):
            def _prepare(self, servers: ServerSet, request: UpdateFromDisk) -> None:
                super()._prepare(servers, request)
                dying.close()

        trainer = Trainer(model, [first, second], kind=Dying)
        trainer.publish(1)
        with refuses(RuntimeError, second, "/pause_generation", 2):
            trainer.publish(2)
        assert a.store.checksums() == model.sums(1) and a.engine.version == "1" and not a.engine.paused


def test_a_version_does_not_go_back(model: Model) -> None:
    s = service(model.path)
    with served(s) as url:
        trainer = Trainer(model, [url])
        trainer.publish(5)
        with refuses(RuntimeError, url, "version 4", "version 5"):
            trainer.publish(4)
        assert s.store.checksums() == model.sums(5) and s.engine.version == "5" and not s.engine.paused
        assert trainer.publish(6).bytes and s.store.checksums() == model.sums(6)


@pytest.mark.parametrize("what", ["another version", "started again", "a rank started again", "all started again"])
def test_without_a_base_that_both_sides_hold_tensors_are_whole(model: Model, what: str) -> None:
    with ExitStack() as stack:
        a = service(model.path)
        first = stack.enter_context(served(a))
        trainer = Trainer(model, [first])
        trainer.publish(1)
        if what == "another version":
            httpx.post(first + endpoints.UPDATE_VERSION, json={"new_version": "0"})
        elif what == "started again":  # with a version of the same name
            a = service(model.path)
            a.engine.set_version("1")
            again = Trainer(model, [stack.enter_context(served(a))])
            for old, new in zip(trainer.ranks, again.ranks, strict=True):
                old._target = new._target
        elif what == "a rank started again":
            trainer.ranks[1] = Trainer(model, [first]).ranks[1]
        else:  # the trainer, as after --resume
            trainer = Trainer(model, [first])
        report = trainer.publish(2)
        assert a.store.checksums() == model.sums(2) and a.engine.version == "2"
        whole = sum(t.nbytes for t in model.encoded(2).values())
        if what == "a rank started again":
            assert whole * 0.5 < report.bytes < whole, "its half is whole"
        else:
            assert report.bytes == whole and not is_difference(trainer.directory / "version_2")
        trainer.publish(3)
        assert a.store.checksums() == model.sums(3) and is_difference(trainer.directory / "difference_3")


def test_a_version_published_once_more(model: Model) -> None:
    """Nothing differs; and back to older weights, which do."""
    s = service(model.path)
    with served(s) as url:
        trainer = Trainer(model, [url])
        whole = trainer.publish(5).bytes
        assert trainer.publish(5).bytes < 0.2 * whole and s.engine.version == "5"
        trainer.publish(5)
        assert trainer.publish(6, of=2).bytes < 0.9 * whole
        assert s.store.checksums() == model.sums(2) and s.engine.version == "6"


def test_servers_check_before_the_pause_and_answer_meanwhile(model: Model) -> None:
    s = service(model.path)
    asked: list[str] = []

    class Watched(DeltaPublisher):
        def _prepare(self, servers: ServerSet, request: UpdateFromDisk) -> None:
            super()._prepare(servers, request)
            asked.append(f"prepared, {s.engine.version}, {s.engine.paused}")
            assert s._delta is not None and s.store.checksums() == model.sums(1)

    with served(s) as url:
        trainer = Trainer(model, [url], kind=Watched)
        trainer.publish(1)
        reads = s.delta
        s.delta = lambda *a: asked.append("read") or reads(*a)  # type: ignore[method-assign,func-returns-value]
        trainer.publish(2)
    assert asked == ["read", "prepared, 1, False"], "it is read once, and served only when all servers have it"
    assert s._delta is None, "no second copy is kept"


def test_a_server_that_lost_what_it_prepared_reads_it_again(model: Model) -> None:
    s = service(model.path)

    class Forgetful(DeltaPublisher):
        def _prepare(self, servers: ServerSet, request: UpdateFromDisk) -> None:
            super()._prepare(servers, request)
            s._delta = None

    with served(s) as url:
        trainer = Trainer(model, [url], kind=Forgetful)
        trainer.publish(1)
        trainer.publish(2)
    assert s.store.checksums() == model.sums(2)


def test_the_endpoint_takes_each_directory_for_what_it_is(model: Model) -> None:
    s = service(model.path)

    def asked(path: Path, **more: Any) -> tuple[int, str]:
        reply = httpx.post(url + endpoints.UPDATE_FROM_DISK, json={"model_path": str(path)} | more)
        return reply.status_code, reply.json()["message"]

    with served(s) as url:
        trainer = Trainer(model, [url])
        trainer.publish(1)
        trainer.publish(2)
        difference, held = trainer.directory / "difference_2", s.store.checksums()
        for path, more, fact in (
            (difference, {}, "difference_2"),
            (difference, {"load_format": "delta"}, "version 2"),  # its base is version 1
            (model.path, {"load_format": "delta"}, "delta"),
            (model.where / "nowhere", {"load_format": "delta"}, "nowhere"),
            (model.path, {"prepare": True}, "prepare"),
            (model.path, {"load_format": "dummy"}, "dummy"),
        ):
            status, message = asked(path, **more)
            assert status == 400 and fact in message and "\n" not in message, (path, more, message)
        httpx.post(url + endpoints.UPDATE_VERSION, json={"new_version": "1"})
        status, message = asked(difference, load_format="delta", weight_version="9")
        assert status == 400 and "9" in message
        assert s.store.checksums() == held


def test_released_weights_take_no_difference(model: Model) -> None:
    s = service(model.path)
    with served(s) as url:
        trainer = Trainer(model, [url])
        trainer.publish(1)
        trainer.publish(2)
        for path in (endpoints.RELEASE_MEMORY, endpoints.RESUME_MEMORY):
            httpx.post(url + path, json={"tags": ["weights"]}).raise_for_status()
        body = {"model_path": str(trainer.directory / "version_2"), "load_format": "delta"}
        reply = httpx.post(url + endpoints.UPDATE_FROM_DISK, json=body)
        assert reply.status_code == 400 and "released" in reply.json()["message"]
        report = trainer.publish(3)
        assert report.bytes == report.whole_bytes and s.store.checksums() == model.sums(3)


def test_an_announcement_that_does_not_come_is_named(model: Model) -> None:
    trainer = Trainer(model, ["http://127.0.0.1:9"])
    second = trainer.ranks[1]
    object.__setattr__(second._target, "config", PublishConfig(path="delta", parts_timeout_s=0.1))
    with refuses(RuntimeError, "difference_3.against", 0.1, "publish.parts_timeout_s"):
        second.publish(model.weights(3), version=3)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        (("rollout.engine=sglang",), ("rollout.engine", "sglang", "disk")),
        (("rollout.embedded.tp_size=2",), ("rollout.embedded.tp_size", 2)),
        (("cluster.colocate=true",), ("cluster.colocate", "tensor")),
    ],
)
def test_servers_without_a_receiver_are_refused(settings: tuple[str, ...], facts: tuple[object, ...]) -> None:
    tiny = Path(__file__).parents[4] / "configs" / "tiny.toml"
    with refuses(ValueError, "publish.path", "delta", *facts):
        load_config(tiny, ["publish.path=delta", *settings])
    assert load_config(tiny, ["publish.path=delta"]).publish.path == "delta"
