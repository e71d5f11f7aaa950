"""The engine together with its weights: loading, updating and naming them. Runs on the engine's thread."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from miles_like.hf_checkpoint import HFCheckpoint, generation_eos
from miles_like.types import NamedTensor
from quant.hf_config import spec_from_hf
from rollout.embedded import plain_ops
from rollout.embedded.engine import Engine, EngineLimits
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model import Model
from rollout.embedded.operations import Operations
from rollout.embedded.prepared import Preparation, held
from rollout.embedded.weights import UpdateSession, WeightStore

SESSION_IDLE_S = 300.0


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
        checkpoint = opened(model_path)
        self.arch = architecture_of(checkpoint.config, eos_ids=generation_eos(model_path))
        self.config = checkpoint.config
        self.store = WeightStore.load(checkpoint, self.arch)
        self._preparation = Preparation(dtype, weights=weights, activations=activations, wide=ops.wide)
        model = Model(self.arch, self._preparation.prepare(self.store), ops, dtype)
        self.engine = Engine(model, limits, version=version)
        self._session: UpdateSession | None = None

    def begin_update(self, version: str | None = None) -> None:
        """Raises ValueError while another update is under way. One of an older version is dropped, and so is one that
        nobody has sent anything for in SESSION_IDLE_S seconds: their publisher has died."""
        session = self._session
        if session is not None and not _newer(version, session.begun_as) and session.idle_s < SESSION_IDLE_S:
            of = "" if session.begun_as is None else f" of version {session.begun_as}"
            raise ValueError(f"a weight update{of} has begun already: end it first, or begin one of a newer version")
        self._session = UpdateSession(self.store, begun_as=version)

    def update(self, tensors: Iterable[NamedTensor], *, flush_cache: bool, version: str | None) -> None:
        """Stages tensors. Raises ValueError outside a session, in one of another version, and naming a tensor that
        cannot be this model's."""
        session = self._current(version)
        self.require_flushable(flush_cache)
        for name, tensor in tensors:
            session.add(name, tensor)
        session.version = version if version is not None else session.version
        session.touch()

    def end_update(self, version: str | None = None) -> None:
        """Applies what was staged. Raises ValueError when it is not whole; the old weights then stay, all of them."""
        session = self._current(version)
        self._session = None
        new = session.finish()
        self._publish(self.store.replaced(new), new)
        if session.version is not None:
            self.engine.set_version(session.version)

    def _current(self, version: str | None) -> UpdateSession:
        session = self._session
        if session is None:
            raise ValueError("no weight update has begun, nothing to end: call /begin_weight_update first")
        if None not in (version, session.begun_as) and version != session.begun_as:
            raise ValueError(
                f"the weight update that has begun is of version {session.begun_as}, not {version}: another publisher "
                "has begun its own since"
            )
        return session

    def candidate(self, path: Path) -> HFCheckpoint:
        """A directory that can take the place of the one that is served, as far as its headers tell; nothing of the
        engine is touched, so any thread may ask. Raises ValueError."""
        checkpoint = opened(path)
        arch = architecture_of(checkpoint.config, eos_ids=self.arch.eos_ids)
        if arch != self.arch:
            raise ValueError(f"{path} is another model than {self.model_path}: start a server for it")
        self.store.check_coverage(spec_from_hf(checkpoint.config), path)
        return checkpoint

    def update_from_disk(self, path: Path, *, flush_cache: bool, version: str | None) -> None:
        """All weights from a directory of the same architecture. Raises ValueError; the old weights then stay."""
        self.require_flushable(flush_cache)
        self.take(self.candidate(path), flush_cache=flush_cache, version=version)

    def take(self, checkpoint: HFCheckpoint, *, flush_cache: bool, version: str | None) -> None:
        """All weights of a `candidate`. Raises ValueError; the old weights then stay."""
        self.require_flushable(flush_cache)
        with _as_sentences(checkpoint.path):
            store = WeightStore.load(checkpoint, self.arch)
        self._publish(store, None)
        self.model_path = checkpoint.path
        if version is not None:
            self.engine.set_version(version)

    def _publish(self, store: WeightStore, changed: Iterable[str] | None) -> None:
        """Everything that can fail comes before the first change."""
        model = self.engine.model
        if changed is None:
            prepared = self._preparation.prepare(store)
        else:
            prepared = self._preparation.prepare(store, old=model.weights, changed=changed)
        self.store, model.weights = store, prepared
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


def opened(path: Path) -> HFCheckpoint:
    """Raises ValueError for what is no model directory that can be read."""
    with _as_sentences(path):
        if not path.is_dir():
            raise ValueError(f"{path} is not a directory: give a Hugging Face model directory")
        return HFCheckpoint(path)


@contextmanager
def _as_sentences(path: Path) -> Iterator[None]:
    """What reading a damaged or hostile directory raises, as ValueError."""
    try:
        yield
    except (OSError, RuntimeError, TypeError, KeyError, AttributeError, ArithmeticError, MemoryError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else f"{type(e).__name__}: {e}"
        raise ValueError(f"{reprlib.repr(str(path))} cannot be read as a model directory ({why})") from e


def _newer(version: str | None, than: str | None) -> bool:
    """Of two weight versions as numbers; one that is no number is never newer, nor older."""
    return version is not None and than is not None and _number(version) > _number(than) >= 0


def _number(version: str) -> int:
    return int(version) if version.isdecimal() and len(version) < 20 else -1
