"""The engine together with its weights: loading, updating and naming them. Runs on the engine's thread."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from miles_like.hf_checkpoint import HFCheckpoint
from miles_like.types import NamedTensor
from rollout.embedded import plain_ops
from rollout.embedded.engine import Engine, EngineLimits
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model import Model
from rollout.embedded.operations import Operations
from rollout.embedded.prepared import prepare
from rollout.embedded.weights import UpdateSession, WeightStore


class Service:
    """One model being served. New weights take effect all at once or not at all."""

    def __init__(
        self,
        model_path: Path,
        limits: EngineLimits,
        *,
        dtype: torch.dtype = torch.float32,
        version: str = "default",
        ops: Operations = plain_ops,
    ) -> None:
        """Raises ValueError with one sentence when the directory cannot be served."""
        self.model_path = model_path
        checkpoint = HFCheckpoint(model_path)
        self.arch = architecture_of(checkpoint.config, eos_ids=_generation_eos(model_path))
        self.config = checkpoint.config
        self.store = WeightStore.load(checkpoint, self.arch)
        model = Model(self.arch, prepare(self.store, dtype), ops, dtype)
        self.engine = Engine(model, limits, version=version)
        self._session: UpdateSession | None = None

    def begin_update(self) -> None:
        if self._session is not None:
            raise ValueError("a weight update has begun already: end it first")
        self._session = UpdateSession(self.store)

    def update(self, tensors: Iterable[NamedTensor], *, flush_cache: bool, version: str | None) -> None:
        """Stages tensors. Raises ValueError outside a session, and naming a tensor that cannot be this model's."""
        if self._session is None:
            raise ValueError("no weight update has begun: call /begin_weight_update first")
        self.require_flushable(flush_cache)
        for name, tensor in tensors:
            self._session.add(name, tensor)
        self._session.version = version if version is not None else self._session.version

    def end_update(self) -> None:
        """Applies what was staged. Raises ValueError when it is not whole; the old weights then stay, all of them."""
        session = self._session
        if session is None:
            raise ValueError("no weight update has begun: nothing to end")
        self._session = None
        new = session.finish()
        self.store.replace(new)
        self._publish(new)
        if session.version is not None:
            self.engine.set_version(session.version)

    def update_from_disk(self, path: Path, *, flush_cache: bool, version: str | None) -> None:
        """All weights from a directory of the same architecture. Raises ValueError; the old weights then stay."""
        self.require_flushable(flush_cache)
        checkpoint = HFCheckpoint(path)
        arch = architecture_of(checkpoint.config, eos_ids=self.arch.eos_ids)
        if arch != self.arch:
            raise ValueError(f"{path} is another model than {self.model_path}: start a server for it")
        self.store = WeightStore.load(checkpoint, self.arch)
        self._publish(None)
        self.model_path = path
        if version is not None:
            self.engine.set_version(version)

    def _publish(self, changed: Iterable[str] | None) -> None:
        model = self.engine.model
        if changed is None:
            model.weights = prepare(self.store, model.dtype)
        else:
            model.weights = prepare(self.store, model.dtype, old=model.weights, changed=changed)

    def require_flushable(self, flush_cache: bool) -> None:
        """Frozen requests keep their cache, so it cannot be flushed under them."""
        if flush_cache and self.engine.paused and not self.engine.idle:
            raise ValueError(
                f"{self.engine.running} requests are paused in place and hold the cache: send flush_cache = false, "
                "or pause with mode retract"
            )


def _generation_eos(path: Path) -> tuple[int, ...] | None:
    """`generation_config.json` says it for the checkpoints that have one."""
    file = path / "generation_config.json"
    if not file.exists():
        return None
    try:
        eos = json.loads(file.read_text()).get("eos_token_id")
    except ValueError as e:
        raise ValueError(f"{file} is not JSON ({e}): fetch it again") from None
    return None if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),)
