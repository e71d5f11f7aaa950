"""The engine with its weights: loading, updates, versions. Runs on the engine's thread."""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from miles_like.hf.checkpoint import HFCheckpoint, generation_eos
from miles_like.types import NamedTensor
from quant.hf_config import spec_from_hf
from rollout.embedded.engine.engine import Engine, EngineLimits
from rollout.embedded.families.registry import architecture_of
from rollout.embedded.model import plain_ops
from rollout.embedded.model.model import Model
from rollout.embedded.model.operations import Operations
from rollout.embedded.model.prepared import Preparation, held
from rollout.embedded.model.weights import UpdateSession, WeightStore
from rollout.embedded.server.memory import Memory, trim_heap
from rollout.wire.bodies import MemoryTag

SESSION_IDLE_S = 300.0


class Service:
    """One served model. An update of weights takes effect completely or not at all."""

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
        """weights, activations: as in `Preparation`. Raises ValueError when the directory cannot be served."""
        self.model_path = model_path
        checkpoint = opened(model_path)
        self.arch = architecture_of(checkpoint.config, eos_ids=generation_eos(model_path))
        self.config = checkpoint.config
        self.store = WeightStore.load(checkpoint, self.arch)
        self._preparation = Preparation(dtype, weights=weights, activations=activations, wide=ops.wide)
        model = Model(self.arch, self._preparation.prepare(self.store), ops, dtype)
        self.engine = Engine(model, limits, version=version)
        self._session: UpdateSession | None = None
        self._memory = Memory()

    def begin_update(self, version: str | None = None) -> None:
        """Raises ValueError while another update is unfinished, unless that is of an older version or has received no
        request for SESSION_IDLE_S seconds: its publisher is assumed dead, and it is dropped. Raises ValueError while
        the memory of the weights is released, as do the other methods that read or change weights."""
        self._memory.require_weights()
        session = self._session
        if session is not None and not _newer(version, session.begun_as) and session.idle_s < SESSION_IDLE_S:
            other = "" if session.begun_as is None else f" of version {session.begun_as}"
            raise ValueError(f"a weight update{other} has begun already: end it first, or begin one of a newer version")
        self._session = UpdateSession(self.store, begun_as=version)

    def require_update(self, version: str | None) -> None:
        """Raises ValueError outside of an update and in one of another version."""
        self._update_session(version)

    def update(self, tensors: Iterable[NamedTensor], *, flush_cache: bool, version: str | None) -> None:
        """Stages tensors. Raises ValueError outside of an update, in one of another version, and naming a tensor that
        does not fit the model."""
        session = self._update_session(version)
        self._memory.require_weights()
        self.require_flushable(flush_cache)
        for name, tensor in tensors:
            session.add(name, tensor)
        session.version = version if version is not None else session.version
        session.touch()

    def end_update(self, version: str | None = None) -> None:
        """Applies the staged tensors. Raises ValueError when they are incomplete; all old weights then stay. After a
        release of the weights an update must bring every one of them."""
        session = self._update_session(version)
        self._memory.require_weights()
        self._session = None
        new = session.finish()
        self._memory.require_all(sorted(self.store.names() - new.keys()), len(self.store.names()))
        self._publish(self.store.replaced(new), new)
        if session.version is not None:
            self.engine.set_version(session.version)

    def _update_session(self, version: str | None) -> UpdateSession:
        session = self._session
        if session is None:
            raise ValueError("no weight update has begun, nothing to end: call /begin_weight_update first")
        if None not in (version, session.begun_as) and version != session.begun_as:
            raise ValueError(
                f"the weight update that has begun is of version {session.begun_as}, not {version}: another publisher "
                "has begun another one since"
            )
        return session

    def candidate(self, path: Path) -> HFCheckpoint:
        """Opens a directory that can replace the served one, judging by its headers. Does not access the engine, so any
        thread may call it. Raises ValueError."""
        checkpoint = opened(path)
        arch = architecture_of(checkpoint.config, eos_ids=self.arch.eos_ids)
        if arch != self.arch:
            raise ValueError(f"{path} is another model than {self.model_path}: start a server for it")
        self.store.check_coverage(spec_from_hf(checkpoint.config), path)
        return checkpoint

    def update_from_disk(self, path: Path, *, flush_cache: bool, version: str | None) -> None:
        """Replaces all weights from a directory of the same architecture. On ValueError the old weights stay."""
        self.require_flushable(flush_cache)
        self.load(self.candidate(path), flush_cache=flush_cache, version=version)

    def load(self, checkpoint: HFCheckpoint, *, flush_cache: bool, version: str | None) -> None:
        """Replaces all weights by those of a `candidate`. On ValueError the old weights stay."""
        self._memory.require_weights()
        self.require_flushable(flush_cache)
        with _as_value_errors(checkpoint.path):
            store = WeightStore.load(checkpoint, self.arch)
        self._publish(store, None)
        self.model_path = checkpoint.path
        if version is not None:
            self.engine.set_version(version)

    def _publish(self, store: WeightStore, changed: Iterable[str] | None) -> None:
        """Every step that can fail comes before the first change."""
        model = self.engine.model
        if changed is None or self._memory.undefined:
            prepared = self._preparation.prepare(store)
        else:
            prepared = self._preparation.prepare(store, old=model.weights, changed=changed)
        self.store, model.weights = store, prepared
        self.engine.weights_changed()
        self._memory.undefined = False
        self.engine.refusal = self._memory.refusal

    # ---- memory

    def release(self, tags: Collection[MemoryTag]) -> dict[str, int]:
        """Frees the memory of `tags`; returns `held`. Until it is resumed, and after a release of the weights until all
        of them have been replaced, prompts are refused. The keys and values of all prefixes are dropped with the cache.
        Raises ValueError, without effect, while requests run or wait or an update of weights is unfinished, and for
        memory that is released already."""
        engine = self.engine
        if engine.running or engine.waiting:
            raise ValueError(
                f"{engine.running} samples run and {engine.waiting} wait: memory is released on an idle server only; "
                "wait for them or abort them first"
            )
        if self._session is not None and MemoryTag.WEIGHTS in tags:
            raise ValueError("a weight update has begun: end it before the weights are released")
        self._memory.release(tags)
        if MemoryTag.KV_CACHE in tags:
            engine.cache.free_memory()
        if MemoryTag.WEIGHTS in tags:
            self.store, engine.model.weights = self.store.without_values(), None
            self._preparation.scratch.free_memory()
        engine.refusal = self._memory.refusal
        trim_heap()
        return self.held()

    def resume(self, tags: Collection[MemoryTag]) -> dict[str, int]:
        """Makes the memory of `tags` usable again; returns `held`. The cache is empty; the weights take up memory with
        the update that replaces them. Raises ValueError, without effect, for memory that is not released."""
        self._memory.resume(tags)
        if MemoryTag.KV_CACHE in tags:
            self.engine.cache.allocate_memory()
        self.engine.refusal = self._memory.refusal
        return self.held()

    def held(self) -> dict[str, int]:
        """Bytes in memory for each tag. Nothing is held for CUDA graphs: there are none on CPU."""
        return {
            MemoryTag.KV_CACHE.value: self.engine.cache.nbytes,
            MemoryTag.WEIGHTS.value: self.weights_bytes,
            MemoryTag.CUDA_GRAPH.value: 0,
        }

    def checksums(self) -> dict[str, str]:
        """As `WeightStore.checksums`."""
        self._memory.require_weights(defined=True)
        return self.store.checksums()

    @property
    def weights_bytes(self) -> int:
        """Memory of the weights: the store, prepared copies, and the buffer for decoded values."""
        return sum({s.data_ptr(): s.nbytes() for s in self._storages()}.values())

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        scratch = self._preparation.scratch.tensor
        for t in itertools.chain(self.store.tensors(), held(self.engine.model.weights), [scratch]):
            yield t.untyped_storage()

    def require_flushable(self, flush_cache: bool) -> None:
        """Raises ValueError if the cache is to be flushed while frozen requests use it."""
        if flush_cache and self.engine.paused and not self.engine.idle:
            raise ValueError(
                f"{self.engine.running} requests are paused in place and hold the cache: send flush_cache = false, "
                "or pause with mode retract"
            )


def opened(path: Path) -> HFCheckpoint:
    """Raises ValueError unless `path` is a readable model directory."""
    with _as_value_errors(path):
        if not path.is_dir():
            raise ValueError(f"{path} is not a directory: give a Hugging Face model directory")
        return HFCheckpoint(path)


@contextmanager
def _as_value_errors(path: Path) -> Iterator[None]:
    """Converts the errors of reading a damaged or hostile directory to ValueError."""
    try:
        yield
    except (OSError, RuntimeError, TypeError, KeyError, AttributeError, ArithmeticError, MemoryError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else f"{type(e).__name__}: {e}"
        raise ValueError(f"{reprlib.repr(str(path))} cannot be read as a model directory ({why})") from e


def _newer(version: str | None, than: str | None) -> bool:
    """Compares weight versions as numbers; a version that is not a number is neither newer nor older."""
    return version is not None and than is not None and _number(version) > _number(than) >= 0


def _number(version: str) -> int:
    return int(version) if version.isdecimal() and len(version) < 20 else -1
