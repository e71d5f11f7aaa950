"""Whole runs on plain processes whose server goes wrong in mid-run: what tests/laws/test_routes_in_mid_run.py plants.

The planted faults are in what a server sends, before the driver seals it, or in what a server holds: not in a
transport, whose errors are found by its own seals and checksums.
"""

from __future__ import annotations

import base64
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from miles_like.cluster.rank import Rank
from miles_like.types import NamedTensor, PublishReport
from rollout.embedded.engine.engine import Engine
from rollout.embedded.model.weights import WeightStore
from rollout.embedded.server.service import Service
from rollout.sglang import samples
from rollout.wire.generate import GenerateReply
from tests.support import local_run
from tests.support.forked import tail

MODEL = {**local_run.SMALL_MODEL, "n_routed_experts": 16, "num_hidden_layers": 4, "n_group": 1, "topk_group": 1}
LAYERS, DEPTH = (1, 2, 3), 4
Change = Callable[[np.ndarray], np.ndarray]  # of the wire's ids [rows, L, K] of the MoE layers


def shifted(ids: np.ndarray) -> np.ndarray:
    """Each row holds the routes of the token before."""
    return np.roll(ids, 1, 0)


def swapped(ids: np.ndarray) -> np.ndarray:
    """Two neighbouring layers of three."""
    return ids[:, [1, 0, 2]]


def rotated(ids: np.ndarray) -> np.ndarray:
    return np.roll(ids, 1, 1)


def spoilt(reply: GenerateReply, change: Change, layers: Sequence[int] = LAYERS, depth: int = DEPTH) -> GenerateReply:
    """The reply as a server would send it that captures routes wrongly."""
    if reply.routed_experts is None:
        return reply
    rows = reply.prompt_tokens + len(reply.output_ids) - 1
    ids = np.frombuffer(base64.b64decode(reply.routed_experts), "<i4").reshape(rows, depth, -1).copy()
    ids[:, list(layers)] = change(ids[:, list(layers)])
    return replace(reply, routed_experts=base64.b64encode(ids.tobytes()).decode())


def make_home(where: Path) -> None:
    """As local_run.make_home, of a model whose routers tell tokens apart."""
    from megatron_bridge.convert.to_megatron import to_megatron
    from tests.support.tiny_models import felt_tensors, tiny, write_checkpoint

    hf = tiny(**MODEL)
    tensors = {n: x * (0 if n.endswith("e_score_correction_bias") else 1) for n, x in felt_tensors(hf).items()}
    write_checkpoint(where / "hf", hf, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy2(local_run.TINY.parent / "tiny" / name, where / "hf" / name)
    to_megatron(where / "hf", where / "megatron")


# ---- what goes wrong, planted in the driver's process before the others are forked from it


def plant_routes(change: Change, version: int, *, layers: Sequence[int] = LAYERS, depth: int = DEPTH) -> None:
    """Routes of samples that weights of `version` or later began are spoilt."""
    plain = samples.SampleReader.extend

    def sent(r: GenerateReply) -> GenerateReply:
        return spoilt(r, change, layers, depth) if int(r.weight_version or 0) >= version else r

    vars(samples)["SampleReader"].extend = lambda self, of, fed, replies: plain(self, of, fed, [*map(sent, replies)])


def plant_logprobs(version: int) -> None:
    """A server whose log-probabilities come one token late."""
    plain = samples.SampleReader.extend

    def late(r: GenerateReply) -> GenerateReply:
        if r.logprobs is None or int(r.weight_version or 0) < version:
            return r
        return replace(r, logprobs=np.ascontiguousarray(np.roll(r.logprobs, 1)))

    vars(samples)["SampleReader"].extend = lambda self, of, fed, replies: plain(
        self, of, fed, [late(r) for r in replies]
    )


def plant_flip(version: int) -> None:
    """One bit of one served tensor flips while weights of `version` generate: after their publication was verified."""
    plain, make, services, done = Engine.step, Service.__init__, list[Service](), list[str]()
    began = dict[str, int]()

    def made(self: Service, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        services.append(self)

    def step(self: Engine) -> bool:
        since = self.generated - began.setdefault(self.version, self.generated)
        if self.version == str(version) and since >= 3 and not done:
            done.append(flip(services[0].store))
        return plain(self)

    Service.__init__, Engine.step = made, step  # type: ignore[method-assign]


def flip(store: WeightStore) -> str:
    """A bit of the mantissa of one value, in the memory of the store; the tensor's name."""
    name = "model.layers.2.post_attention_layernorm.weight"
    held = store._stored[name]
    assert isinstance(held, torch.Tensor)
    width = {2: torch.int16, 4: torch.int32}[held.element_size()]
    bits = held.view(width)
    bits[3] ^= 1 << (20 if held.element_size() == 4 else 4)
    return name


def plant_stale(first: int, *, times: int) -> None:
    """The first `times` publications of version `first` send other values of two projections of one layer; checksums
    are of what is sent."""
    plain, done = Rank.publish, list[int]()
    names = [f"model.layers.2.self_attn.{part}.weight" for part in ("q_a_proj", "kv_a_proj_with_mqa")]

    def publish(self: Rank, version: int) -> PublishReport:
        if version != first or len(done) == times:
            return plain(self, version)
        done.append(version)
        whole = self.trainer.export

        def stale() -> Iterator[NamedTensor]:
            return (NamedTensor(n, x.flip(0) if n in names else x) for n, x in whole())

        with mock.patch.object(self.trainer, "export", stale):
            return plain(self, version)

    Rank.publish = publish  # type: ignore[method-assign]


PLANTS: dict[str, Callable[[int], None]] = {
    "none": lambda version: None,
    "shifted": lambda version: plant_routes(shifted, version),
    "swapped": lambda version: plant_routes(swapped, version),
    "rotated": lambda version: plant_routes(rotated, version),
    "late logprobs": plant_logprobs,
    "flip": plant_flip,
    "stale once": partial(plant_stale, times=1),
    "stale": partial(plant_stale, times=9),
}


def drive(run_dir: Path, home: Path, settings: Sequence[str], plant: str, version: int) -> int:
    PLANTS[plant](version)
    return local_run.drive(run_dir, home, settings, None)


class Runs:
    """Starts runs on the model of `home`, which it makes."""

    def __init__(self, home: Path) -> None:
        self._starter, self.home = local_run.shared_starter(), home
        assert self._starter.call(home / "home.log", make_home, home) == 0, tail(home / "home.log")

    def run(self, run_dir: Path, settings: Sequence[str] = (), plant: str = "none", version: int = 2) -> int:
        """From where the run stands; the fault is in what weights of `version` sample."""
        return self._starter.call(run_dir / "driver.log", drive, run_dir, self.home, settings, plant, version)
