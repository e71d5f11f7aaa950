"""Publications to two embedded servers, of which the second goes wrong in the middle, in a process for each.

`Publications` forks the servers from a process that has imported everything, publishes versions of random weights, and
writes down what each server serves afterwards.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from miles_like.hf.checkpoint import HFCheckpoint
from miles_like.hf.merged import join_parts
from miles_like.types import NamedTensor
from rollout.config import PublishConfig, RolloutConfig
from rollout.publish.directory import disk_publisher
from rollout.publish.directory.delta_publisher import DeltaPublisher
from rollout.publish.directory.disk_publisher import DiskPublisher, SharedDirectory
from rollout.publish.directory.shares import Shares
from rollout.publish.publication import PublishTarget
from rollout.publish.publisher import TensorPublisher
from rollout.sglang.servers import ServerLaunch, embedded_command
from rollout.wire import endpoints
from tests.support import broken_servers
from tests.support.forked import Forked, answers
from tests.support.local_parts import LocalServers
from tests.support.local_run import SMALL_MODEL, _Server
from tests.support.spawn import free_port
from tests.support.tiny_models import random_tensors, tiny, write_checkpoint

PATIENCE_S, SHORT_S = 60.0, 2.0  # of a request; where a server hangs
OTHER = {"hidden_size": 32}  # of a server of another model


@dataclass(kw_only=True)
class Found:
    """What became of a publication."""

    error: str = ""  # empty: there was none
    failed: list[str] = field(default_factory=list)  # servers that the report names
    served: dict[str, Any] = field(default_factory=dict)  # number of a server -> version, sum, version of a sample


class Publications:
    """goes_on: as in PublishTarget. timeout_s: of a request."""

    def __init__(
        self, where: Path, path: Any, *, goes_on: bool = False, other: bool = False, timeout_s: float = PATIENCE_S
    ) -> None:
        self.where, self.path, self.goes_on, self.timeout_s = where, path, goes_on, timeout_s
        self.hf = write(where / "hf")
        models = [self.hf, write(where / "other", **OTHER) if other else self.hf]
        makes = [answers(_Server), answers(partial(self._broken, 1))]
        processes = [Forked(f"server {i}", make, where / f"server_{i}.log") for i, make in enumerate(makes)]
        spares = [Forked("spare", answers(_Server), where / "spare.log")]
        ports = [free_port(), free_port()]
        words = [self._command(model, port) for model, port in zip(models, ports, strict=True)]
        self.servers = LocalServers(processes, words, ports, spares)
        self.urls = self.servers.wait()
        self.publisher = self.made(self.urls)

    def made(self, urls: Sequence[str], **more: Any) -> TensorPublisher | DiskPublisher:
        """A publisher to `urls`."""
        config = PublishConfig(path=self.path, bucket_bytes=20_000, hold_bytes=1, parts_timeout_s=0.3)
        target = PublishTarget(
            urls=tuple(urls),
            kind="embedded",
            spec=None,
            config=config,
            timeout_s=self.timeout_s,
            goes_on=self.goes_on,
            **more,
        )
        if self.path in ("disk", "delta"):
            hf = HFCheckpoint(self.hf).config
            shared = SharedDirectory(path=self.where / "published", hf_config=hf, copy_from=self.hf)
            return (DiskPublisher if self.path == "disk" else DeltaPublisher)(target, shared)
        return TensorPublisher(target, send=True)

    def fault(self, name: str) -> None:
        """What the second server does in the middle of the next publication."""
        (self.where / "fault").write_text(name)

    def publish(
        self,
        version: int,
        stream: Callable[[int], Iterator[NamedTensor]] | None = None,
        *,
        publisher: Any = None,
        asked: Sequence[int] = (0, 1),
    ) -> Found:
        """Publishes the weights of `version`, then asks servers what they serve."""
        found, publisher = Found(), publisher or self.publisher
        try:
            report = publisher.publish((stream or self.weights)(version), version=version)
            found.failed = [f.url for f in report.failed]
        except (RuntimeError, ValueError, OSError) as e:
            found.error = str(e)
        found.served = {str(i): served(self.urls[i]) for i in asked}
        return found

    def weights(self, version: int) -> Iterator[NamedTensor]:
        g = torch.Generator().manual_seed(version)
        for name, x in HFCheckpoint(self.hf).stream():
            yield NamedTensor(name, x + (0.01 * torch.randn(x.shape, generator=g)).to(x.dtype))

    def cut_off(self, version: int) -> Iterator[NamedTensor]:
        """As the collectives of a rank whose peer has died."""
        for i, named in enumerate(self.weights(version)):
            if i == 20:
                raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
            yield named

    def _broken(self, number: int) -> _Server:
        marker = self.where / "fault"

        def fault(version: str | None) -> str | None:
            if not marker.exists():
                return None
            name = marker.read_text()
            marker.unlink()
            return name

        broken_servers.plant(fault)
        return _Server()

    def _command(self, model: Path, port: int) -> list[str]:
        config = RolloutConfig.model_validate({"embedded": {"threads": 1, "context_length": 128}})
        command = embedded_command(ServerLaunch(model_path=model, config=config, log_dir=self.where), port)
        return command[command.index("rollout.embedded.server") + 1 :]


def write(path: Path, **changes: Any) -> Path:
    hf = tiny(**SMALL_MODEL, **changes) if not changes else tiny(**{**SMALL_MODEL, **changes})
    write_checkpoint(path, hf, random_tensors(hf))
    return path


def served(url: str) -> Mapping[str, Any] | None:
    """None: it cannot be reached, or is paused."""
    with httpx.Client(base_url=url, timeout=httpx.Timeout(SHORT_S + PATIENCE_S)) as http:
        try:
            info, sums = http.get(endpoints.MODEL_INFO).json(), http.post(endpoints.CHECKSUM, json={}).json()
            params = {"max_new_tokens": 2, "temperature": 0.0, "ignore_eos": True}
            body = {"input_ids": [1, 2, 3], "sampling_params": params}
            sample = http.post(endpoints.GENERATE, json=body).json()
        except httpx.HTTPError:
            return None
    return {
        "version": info["weight_version"],
        "sum": sums["per_engine_checksum"],
        "sampled": sample["meta_info"]["weight_version"],
    }


def run(where: Path, path: str, case: str) -> int:
    """In a forked process: the case, and what it found, in `where`/found.json."""
    found = CASES[case](where, path)
    (where / "found.json").write_text(json.dumps({name: asdict(one) for name, one in found.items()}))
    return 0


def _signalled(fault: str, *, goes_on: bool = False) -> Callable[[Path, str], dict[str, Found]]:
    """The second server dies or hangs, and another takes its place."""

    def case(where: Path, path: str) -> dict[str, Found]:
        timeout_s = SHORT_S if fault == "stopped" else PATIENCE_S
        them = Publications(where, path, goes_on=goes_on, timeout_s=timeout_s)
        try:
            before = them.publish(1)
            them.fault(fault)
            broken = them.publish(2, asked=(0,) if fault == "stopped" else (0, 1))
            them.servers.restart(1)
            them.servers.wait()
            joined = them.publish(2, publisher=them.made([them.urls[1]], joins=True)) if goes_on else None
            after = them.publish(3 if goes_on else 2)
            return {"before": before, "broken": broken, "after": after} | ({"joined": joined} if joined else {})
        finally:
            them.servers.stop()

    return case


def _slow(where: Path, path: str) -> dict[str, Found]:
    """The second server answers, too late."""
    them = Publications(where, path, timeout_s=SHORT_S)
    try:
        before = them.publish(1)
        them.fault("slow")
        broken = them.publish(2, asked=(0,))
        time.sleep(broken_servers.SLOW_S)  # until it answers again
        return {"before": before, "broken": broken, "after": them.publish(2)}
    finally:
        them.servers.stop()


def _alive(where: Path, path: str) -> dict[str, Found]:
    """Faults that leave the servers alive, one after the other: each is tried again."""
    them = Publications(where, path)
    out = {}
    try:
        out["before"] = them.publish(1)
        them.fault("out of memory")
        out["out of memory"] = them.publish(2)
        out["out of memory, again"] = them.publish(2)
        out["cut off"] = them.publish(3, them.cut_off)
        out["cut off, again"] = them.publish(3)
        out["back"] = them.publish(2)
        out["back, again"] = them.publish(4)
        if path == "disk":
            out |= _lost_data(them, 5)
        return out
    finally:
        them.servers.stop()


def _lost_data(them: Publications, version: int) -> dict[str, Found]:
    """A shard that loses its end before it is joined, and one that loses it after."""
    out, join, check = {}, join_parts, Shares.check_whole

    def cut(path: Path) -> None:
        (file, *_) = sorted(path.glob("*.safetensors"))
        with file.open("r+b") as f:
            f.truncate(file.stat().st_size - 100)

    def early(parts: Sequence[Path], path: Path) -> int:
        cut(parts[0])
        return join(parts, path)

    def late(self: Any, written: HFCheckpoint) -> None:
        check(self, written)
        cut(written.path)

    vars(disk_publisher)["join_parts"] = early
    out["truncated"] = them.publish(version)
    vars(disk_publisher)["join_parts"] = join
    out["truncated, again"] = them.publish(version)
    Shares.check_whole = late  # type: ignore[method-assign]
    out["truncated late"] = them.publish(version + 1)
    Shares.check_whole = check  # type: ignore[method-assign]
    out["truncated late, again"] = them.publish(version + 1)
    return out


def _other_model(where: Path, path: str) -> dict[str, Found]:
    them = Publications(where, path, other=True)
    try:
        broken = them.publish(1)
        return {"broken": broken, "after": them.publish(1, publisher=them.made(them.urls[:1]), asked=(0,))}
    finally:
        them.servers.stop()


CASES: dict[str, Callable[[Path, str], dict[str, Found]]] = {
    "killed": _signalled("killed"),
    "stopped": _signalled("stopped"),
    "slow": _slow,
    "killed, goes on": _signalled("killed", goes_on=True),
    "stopped, goes on": _signalled("stopped", goes_on=True),
    "alive": _alive,
    "another model": _other_model,
}
