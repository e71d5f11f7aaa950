"""Law: servers that receive weights from several trainer ranks, each in a process group of its source, hold bit for bit
what one publication of the gathered weights gives them; and a source that fails ends the publication at all sources
with one sentence, after which the servers serve the version before and the next try works.

Two Megatron ranks in layouts that divide their model, two embedded servers, over gloo. Why it must hold: buckets of one
version come from several processes, of which none knows what the others do. Not covered: NCCL; servers that hang, by
one sender (test_weights_by_group.py); stock SGLang (tests/sglang_cpu/test_weight_paths.py); which source sends which
tensor (tests/megatron_bridge/weights/test_source_plan.py).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from megatron_bridge.weights.export import _Exporter
from rollout.publish.publisher import TensorPublisher
from rollout.publish.servers import ServerSet
from rollout.publish.sources.publisher import SourcesPublisher, check_together
from rollout.wire import endpoints
from tests.support.chosen import later
from tests.support.embedded_processes import ServerProcess, begun, server_processes
from tests.support.fakes import wait_until
from tests.support.published import Published
from tests.support.refusals import check_refusal, refuses
from tests.support.source_ranks import connect, exported, source_rank
from tests.support.spawn import free_port, run_ranks, warm_context
from tests.support.tiny_models import tiny_dense
from tests.support.wire_bytes import connections, sent_bytes

HERE = "tests/rollout/publish/sources/test_weights_from_sources.py"
LONG = pytest.mark.long(beside=HERE)
SIZES = (1, 20_000)  # bytes of a bucket: a module, and some
FIRST = ["pp2", "tp2_ep2"]
LAYOUTS = [*FIRST, "ep2", "tp2", "tp2_etp2"]
OTHERS = [("qwen_moe", "int4"), ("qwen", "bf16"), ("glm", "fp8")]  # beside the first model
CASE = ("deepseek", "fp8")


def reported(url: str) -> dict[str, str]:
    reply = httpx.get(url + endpoints.CHECKSUM, timeout=60, trust_env=False).json()
    sums: dict[str, str] = reply["ranks"][0]["checksums"]
    return sums


def served(url: str) -> str:
    """The version of a sample."""
    body = {"input_ids": [4, 5], "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}}
    reply = httpx.post(url + endpoints.GENERATE, json=body, timeout=60, trust_env=False).json()
    return str(reply["meta_info"]["weight_version"])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ServerProcess]]:
    """Servers, of which a test may replace one."""
    hf = Published(*CASE).checkpoint(tmp_path_factory.mktemp("sources") / "hf")
    with server_processes(hf, 2) as servers:
        yield servers


def scale(rank: Any) -> None:
    """Change every weight."""
    with torch.no_grad():
        for model in rank.trainer.models:
            for parameter in model.parameters():
                parameter.mul_(1.25)


def _no_broadcast(*_: Any) -> Any:
    raise AssertionError("a source's tensors were broadcast to another stage")


def _publish(
    rank: int, world: int, port: int, hf: Path, layout: str, case: tuple[str, str], urls: list[str], version: int
) -> list[dict[str, Any]]:
    found = []
    with source_rank(rank, world, port, hf, layout) as r:
        for size in SIZES:
            target = Published(*case).target(urls, "distributed", bucket_bytes=size)
            connect(r, target)
            stock = _Exporter._broadcast
            _Exporter._broadcast = _no_broadcast  # type: ignore[method-assign]
            report = r.publish(version)
            _Exporter._broadcast = stock  # type: ignore[method-assign]
            sums, nbytes = exported(r, target)
            found.append(
                {
                    "bytes": (report.bytes, nbytes),
                    "equal": [reported(url) == sums for url in urls],
                    "pause": 0 < report.pause_seconds <= report.seconds,
                    "failed": report.failed,
                }
            )
            version += 1
            scale(r)
    return found


def check_published(found: list[list[dict[str, Any]]], sources: int) -> None:
    lead, other = found
    for one, two in zip(lead, other, strict=True):
        assert one["equal"] == [True, True] and one["pause"] and not one["failed"]
        total, whole = one["bytes"]
        assert total == whole and (0 < two["bytes"][0] < total) == (sources == 2), (one, two)


@pytest.mark.parametrize("layout", later(LAYOUTS, FIRST, HERE))
def test_the_served_bits_are_those_of_the_gathered_weights(layout: str, two: list[ServerProcess]) -> None:
    arguments = (two[0].path, layout, CASE, [s.url for s in two], 10 * LAYOUTS.index(layout) + 1)
    check_published(run_ranks(_publish, 2, *arguments, keep=True), 1 if layout in ("tp2", "tp2_etp2") else 2)


@LONG
@pytest.mark.parametrize("case", OTHERS, ids="-".join)
def test_other_models_and_formats(case: tuple[str, str], tmp_path: Path) -> None:
    hf = Published(*case).checkpoint(tmp_path / "hf")
    with server_processes(hf, 2) as servers:
        for i, layout in enumerate(["pp2"] if case[0] == "qwen" else ["pp2", "ep2", "tp2_ep2"]):
            found = run_ranks(_publish, 2, hf, layout, case, [s.url for s in servers], 10 * i + 1, keep=True)
            check_published(found, 2)


# ---- faults


class Faulty(SourcesPublisher):
    """Rank 1 does something in its second turn."""

    act: Callable[[], None] | None = None
    turns = 0

    def _sends(self, *arguments: Any) -> None:
        self.turns += 1
        if self.act is not None and self.turns == 2 and self._turns is not None and self._turns.number == 1:
            self.act()
        super()._sends(*arguments)


def _faults(
    rank: int, world: int, port: int, hf: Path, urls: list[str], pid: int, version: int, where: Path
) -> list[dict[str, Any]]:
    """Publications, of which some fail; the weights are others after each that does not."""
    found: list[dict[str, Any]] = []

    def publish(number: int, *, finite: bool = True) -> None:
        began, one = time.monotonic(), {}
        if isinstance(r.publisher, Faulty):
            r.publisher.turns = 0
        try:
            report = r.publish(version + number)
            one["failed"] = [(fault.url, fault.answers) for fault in report.failed]
        except (RuntimeError, ValueError) as e:
            one["error"] = str(e)
        one |= {"seconds": time.monotonic() - began, "sums": exported(r, target)[0] if finite else {}}
        for url in urls:
            try:
                one[url] = reported(url)
            except httpx.HTTPError:
                one[url] = None
        found.append(one)

    with source_rank(rank, world, port, hf, "pp2") as r:
        target = Published(*CASE).target(urls, "distributed", bucket_bytes=1, timeout_s=60.0)
        connect(r, target, Faulty)
        publish(1)
        scale(r)
        quantized = next(p for name, p in r.trainer.models[0].named_parameters() if "linear_fc2" in name)
        value = quantized.detach().clone()
        with torch.no_grad():
            quantized.mul_(float("nan") if rank else 1.0)
        publish(2, finite=False)  # rank 1 cannot encode
        with torch.no_grad():
            quantized.copy_(value)
        publish(2)
        publish(1)  # back
        scale(r)
        if rank:
            r.publisher.act = lambda: os.kill(pid, signal.SIGKILL)
        publish(3)  # with a server that dies
        r.publisher.act = None
        if rank:
            (where / "killed").touch()
        assert wait_until((where / "again").exists, 240)
        publish(3)
        scale(r)
        pid = int((where / "again").read_text())
        target = Published(*CASE).target(urls, "distributed", bucket_bytes=1, timeout_s=60.0, goes_on=True)
        connect(r, target, Faulty)
        if rank:
            r.publisher.act = lambda: os.kill(pid, signal.SIGKILL)
        publish(4)  # goes on
        connect(r, Published(*CASE).target(urls[:1], "distributed", timeout_s=60.0, goes_on=True))
        publish(4)
    return found


def test_a_source_or_a_server_that_fails_ends_the_publication_everywhere(
    two: list[ServerProcess], tmp_path: Path
) -> None:
    urls, version = [s.url for s in two], 100
    pid = two[1].process.pid
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(run_ranks, _faults, 2, two[0].path, urls, pid, version, tmp_path, keep=True)
        assert wait_until(lambda: (tmp_path / "killed").exists() or running.done(), 240)
        two[1].process.join(30)
        two[1] = begun(two[1].path, two[1].log, port=two[1].port)
        two[1].await_ready()
        (tmp_path / "new").write_text(str(two[1].process.pid))
        (tmp_path / "new").rename(tmp_path / "again")
        lead, other = running.result()
    first, nan, retried, back, killed, after, left_out, alone = lead
    for one, two_ in ((nan, other[1]), (back, other[3]), (killed, other[4])):
        assert one["error"] == two_["error"], "one sentence at all sources"
    check_refusal(nan["error"], f"version {version + 2}", "trainer rank 1", "NaN or infinite", "previous version")
    check_refusal(back["error"], f"version {version + 1}", f"version {version + 2}", urls[0], unrecorded="a free port")
    check_refusal(killed["error"], f"version {version + 3}", urls[1], "--resume", unrecorded="a free port")
    assert urls[0] not in killed["error"] and killed["seconds"] < 60
    for one in (first, retried, after):
        assert "error" not in one and one[urls[0]] == one[urls[1]] == one["sums"]
    assert nan[urls[0]] == nan[urls[1]] == first["sums"] and retried["sums"] != first["sums"]
    assert back[urls[0]] == killed[urls[0]] == retried["sums"]
    assert sorted(left_out["failed"]) == sorted([(urls[0], True), (urls[1], False)]), left_out
    assert left_out[urls[0]] == after["sums"] != left_out["sums"]
    assert not alone["failed"] and alone[urls[0]] == alone["sums"] == left_out["sums"]
    assert served(urls[0]) == str(version + 4)
    two[1] = begun(two[1].path, two[1].log, port=two[1].port)
    two[1].await_ready()


def _dies(rank: int, world: int, port: int, hf: Path, urls: list[str], out: Path) -> None:
    """Rank 1's process ends in a turn; rank 0 writes its error to `out`."""
    with source_rank(rank, world, port, hf, "pp2") as r:
        connect(r, Published(*CASE).target(urls, "distributed", bucket_bytes=1), Faulty)
        r.publish(201)
        r.publisher.turns = 0
        if rank:
            r.publisher.act = lambda: os._exit(9)
        else:
            r.publisher._turns._limit_s = 2.0
        scale(r)
        try:
            r.publish(202)
        except RuntimeError as e:
            out.write_text(str(e))
        os._exit(0)


@pytest.mark.long(beside="tests/rollout/publish/sources/test_source_turns.py")
def test_a_trainer_rank_that_dies_is_named(two: list[ServerProcess], tmp_path: Path) -> None:
    urls, port, out = [s.url for s in two], free_port(), tmp_path / "error"
    context = warm_context()
    ranks = [context.Process(target=_dies, args=(r, 2, port, two[0].path, urls, out)) for r in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in reversed(ranks):
            process.join(240)
        assert [process.exitcode for process in ranks] == [0, 9]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    check_refusal(out.read_text(), "version 202", "trainer rank 1", "its log", "previous version")
    assert [served(url) for url in urls] == ["201", "201"]
    model = Published(*CASE)
    TensorPublisher(model.target(urls, "distributed"), send=True).publish(model.weights(3), version=202)
    assert [reported(url) for url in urls] == [model.sums(3)] * 2


class _Parted:
    ranks = (0, 4)

    def __init__(self, *parts: list[str]) -> None:
        self.parts = parts

    def names(self, source: int) -> Iterator[str]:
        return iter(self.parts[source])


def test_fused_tensors_of_two_sources_are_refused() -> None:
    """No layout has such, since they are of one layer: a plan that had would leave old weights in stock servers."""
    model = Published("deepseek", "fp8")
    target = model.target(["http://unused"], "distributed")
    first, second = model.fused[0][:2]
    sources: Any = _Parted([first], [second])
    with refuses(ValueError, 0, 4, first, second, "publish.path = 'disk'"):
        check_together(target, sources)
    whole: Any = _Parted([first, second], [])
    check_together(target, whole)


# ---- bytes


def _sent(rank: int, world: int, port: int, hf: Path, url: str) -> tuple[int, int]:
    """Bytes of a publication: on the connections of its group and of the messages of sources, with the requests; and of
    its tensors."""
    bodies = 0
    read = ServerSet._read

    def counting(self: ServerSet, url: str, endpoint: str, content: bytes, headers: Any) -> httpx.Response:
        nonlocal bodies
        bodies += len(content)
        return read(self, url, endpoint, content, headers)

    with source_rank(rank, world, port, hf, "pp2") as r:
        before = connections()
        connect(r, Published("qwen", "bf16").target([url], "distributed", bucket_bytes=1 << 20))
        r.publish(1)
        scale(r)
        own = connections() - before
        begun_at = sent_bytes(own)
        ServerSet._read = counting  # type: ignore[method-assign]
        report = r.publish(2)
        ServerSet._read = read  # type: ignore[method-assign]
        return sent_bytes(own) - begun_at + bodies, report.bytes


@LONG
def test_bytes_on_the_wire_are_those_of_the_encoded_weights(tmp_path: Path) -> None:
    """Over both sources. The store of the ranks, which rank 0 serves, answers over its connections too."""
    model = Published("qwen", "bf16")
    model.hf = tiny_dense(hidden_size=256, intermediate_size=1024, num_hidden_layers=4)
    with server_processes(model.checkpoint(tmp_path / "hf"), 1) as (server,):
        (lead, whole), (other, _) = run_ranks(_sent, 2, server.path, server.url, keep=True)
    assert whole <= lead + other <= 1.02 * whole, (lead, other, whole)
