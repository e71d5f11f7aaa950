"""What one rank holds of a served model: its slices of the weights, and the model that computes with them."""

from __future__ import annotations

import ctypes
import itertools
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from miles_like.hf.checkpoint import HFCheckpoint
from quant.formats.codec import QuantTensor
from rollout.embedded.model.exchange import Exchange
from rollout.embedded.model.model import Model
from rollout.embedded.model.operations import Operations
from rollout.embedded.model.prepared import ModelWeights, Preparation, held
from rollout.embedded.model.slices import Slices
from rollout.embedded.model.weights import WeightStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """In which form weights are kept, and where; as in `Preparation`."""

    dtype: torch.dtype = torch.float32
    weights: Literal["decoded", "codes"] = "decoded"
    activations: Literal["none", "fp8"] = "none"
    device: Literal["cpu", "cuda"] = "cpu"


class _Next(NamedTuple):
    store: WeightStore
    weights: ModelWeights


class Part:
    """Weights are replaced in two steps, so that ranks replace theirs together: `prepare`, which may fail and changes
    nothing, and `commit`."""

    def __init__(
        self,
        checkpoint: HFCheckpoint,
        slices: Slices,
        kept: Kept,
        ops: Operations,
        *,
        exchange: Exchange | None = None,
        model: Callable[..., Model] = Model,
    ) -> None:
        """Raises ValueError for a checkpoint that cannot be served."""
        self.slices = slices
        self._device = torch.device("cuda", 0) if kept.device == "cuda" else torch.device("cpu")
        self.store = WeightStore.load(checkpoint, slices.arch, slices, self._device)
        self.preparation = Preparation(
            kept.dtype, weights=kept.weights, activations=kept.activations, wide=ops.wide, device=self._device
        )
        prepared = self.preparation.prepare(self.store)
        self.model = model(slices.arch, prepared, ops, kept.dtype, slices=slices, exchange=exchange)
        self._next: _Next | None = None

    def prepare(self, new: Mapping[str, Tensor | QuantTensor], *, all_of_them: bool) -> None:
        """Makes the weights ready in which `new` replaces those of its names. all_of_them: `new` has all weights, and
        those that are held are not used."""
        store = self.store.replaced(new)
        old = None if all_of_them else self.model.weights
        self._next = _Next(store, self.preparation.prepare(store, old=old, changed=new))

    def prepare_from(self, checkpoint: HFCheckpoint) -> None:
        """Makes all weights of a checkpoint ready. Raises ValueError."""
        with as_value_errors(checkpoint.path):
            store = WeightStore.load(checkpoint, self.slices.arch, self.slices, self._device)
        self._next = _Next(store, self.preparation.prepare(store))

    def commit(self) -> None:
        """Replaces the weights by those that are ready."""
        assert self._next is not None, "no weights are loaded"
        self.store, self.model.weights = self._next
        self._next = None

    def discard(self) -> None:
        """Drops weights that are ready, if any."""
        self._next = None

    def free(self) -> None:
        """Frees the memory of the weights."""
        self.store, self.model.weights = self.store.without_values(), None
        self.preparation.scratch.free_memory()

    @property
    def nbytes(self) -> int:
        """Memory of the weights: the store, prepared copies, and the buffer for decoded values."""
        return sum({s.data_ptr(): s.nbytes() for s in self._storages()}.values())

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        for t in self._tensors():
            yield t.untyped_storage()

    def _tensors(self) -> Iterable[Tensor]:
        return itertools.chain(self.store.tensors(), held(self.model.weights), [self.preparation.scratch.tensor])


def opened(path: Path) -> HFCheckpoint:
    """Raises ValueError unless `path` is a readable model directory."""
    with as_value_errors(path):
        if not path.is_dir():
            raise ValueError(f"{path} is not a directory: use a Hugging Face model directory")
        return HFCheckpoint(path)


@contextmanager
def as_value_errors(path: Path) -> Iterator[None]:
    """Converts the errors of reading a damaged or hostile directory to ValueError."""
    try:
        yield
    except (OSError, RuntimeError, TypeError, KeyError, AttributeError, ArithmeticError, MemoryError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else f"{type(e).__name__}: {e}"
        raise ValueError(f"{reprlib.repr(str(path))} cannot be read as a model directory ({why})") from e


def trim_heap() -> None:
    """Returns freed memory to the operating system, and that of a GPU to its other processes: glibc keeps freed tensors
    of up to 32 MiB for later allocations, PyTorch all of a GPU. No effect on the host with another C library."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
