"""The engine together with its weights: loading, updating and naming them. Runs on the engine's thread."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch

from miles_like.hf_checkpoint import HFCheckpoint
from miles_like.types import NamedTensor
from quant.hf_config import spec_from_hf
from rollout.embedded import plain_ops
from rollout.embedded.engine import Engine, EngineLimits
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model import Model
from rollout.embedded.operations import Operations
from rollout.embedded.prepared import Preparation, held
from rollout.embedded.weights import UpdateSession, WeightStore


class Service:
    """One model being served. New weights take effect all at once or not at all."""

    def __init__(
        self,
        model_path: Path,
        limits: EngineLimits,
        *,
        dtype: torch.dtype = torch.float32,
        weights: Literal["decoded", "codes"] = "decoded",
        activations: Literal["none", "fp8"] = "none",
        version: str = "default",
        ops: Operations = plain_ops,
    ) -> None:
        """weights, activations: as of `Preparation`. Raises ValueError with one sentence when the directory cannot be
        served."""
        self.model_path = model_path
        checkpoint = HFCheckpoint(model_path)
        self.arch = architecture_of(checkpoint.config, eos_ids=_generation_eos(model_path))
        self.config = checkpoint.config
        self.store = WeightStore.load(checkpoint, self.arch)
        self._preparation = Preparation(dtype, weights=weights, activations=activations, wide=ops.wide)
        model = Model(self.arch, self._preparation.prepare(self.store), ops, dtype)
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
        self.store.check_coverage(spec_from_hf(checkpoint.config), path)
        self.store = WeightStore.load(checkpoint, self.arch)
        self._publish(None)
        self.model_path = path
        if version is not None:
            self.engine.set_version(version)

    def _publish(self, changed: Iterable[str] | None) -> None:
        model = self.engine.model
        if changed is None:
            model.weights = self._preparation.prepare(self.store)
        else:
            model.weights = self._preparation.prepare(self.store, old=model.weights, changed=changed)
        self.engine.weights_changed()

    @property
    def weights_bytes(self) -> int:
        """Resident: what came in, what is multiplied with where that is a copy, and the buffer for decoded values."""
        storages = {s.data_ptr(): s.nbytes() for s in self._storages()}
        return sum(storages.values()) + self._preparation.scratch.nbytes

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        for t in itertools.chain(self.store.tensors(), held(self.engine.model.weights)):
            yield t.untyped_storage()

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
