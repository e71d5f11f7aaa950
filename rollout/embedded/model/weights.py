"""The weights of a model as a checkpoint stores them, and updates of them.

The store keeps the tensors as received, including all stored tensors of quantized weights, so its checksums are those
of the published bytes. `prepared.py` builds the model's weights from it; memory is shared where both hold the same. On
one of several ranks both hold that rank's slices.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_like.hf.checkpoint import HFCheckpoint
from quant.formats.codec import PerBlock, QuantTensor
from quant.hf_config import spec_from_hf
from quant.registry import codec_or_none
from quant.spec import QuantFormat, QuantSpec
from quant.stream import coded_weight_of, pair_stream, refuse_foreign, stored_name
from rollout.embedded.families.architecture import Architecture
from rollout.embedded.model.projections import Codes
from rollout.embedded.model.slices import Slices
from rollout.embedded.model.tensors import expected_tensors
from rollout.wire.checksum import engine_checksum, tensor_checksum

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class WeightStore:
    """The weights of one model, or the slices of them that one rank of a server holds, under their Hugging Face
    names."""

    def __init__(
        self,
        arch: Architecture,
        spec: QuantSpec | None,
        slices: Slices | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """slices: None for all weights. device: of what is held. Raises ValueError for slices that cut a
        block of a quantized weight."""
        self.arch, self.device = arch, torch.device(device)
        self.slices = slices or Slices(arch=arch)
        self._codec = codec_or_none(spec)
        self.spec = spec if self._codec is not None else None
        self._expected = expected_tensors(arch)  # of the whole model
        self._shapes = {  # of what is held
            name: (len(rows), *shape[1:])
            for name, shape in self._expected.items()
            if (rows := self.slices.rows(name, shape[0])) is not None
        }
        if self.spec is not None and self.slices.tp > 1:
            self._check_blocks(self.spec)
        self._stored: dict[str, Tensor | QuantTensor] = {}
        self._dtypes: dict[str, torch.dtype] = {}  # received dtypes of tensors that are held in a wider one

    def _check_blocks(self, spec: QuantSpec) -> None:
        for name, shape in self._expected.items():
            rows, block = self.slices.rows(name, shape[0]), spec.block[0]
            if rows is None or not spec.covers(name, shape) or len({r // block for r in (rows[0], rows[-1])}) == 1:
                continue
            if rows.start % block:
                raise ValueError(
                    f"{name} {list(shape)}: rank {self.slices.rank} of {self.slices.tp} holds its rows {rows.start} to "
                    f"{rows.stop}, which begin inside a block of {block} rows with one scale ({spec.format}): lower "
                    "tp_size, or raise ep_size for experts"
                )

    @classmethod
    def load(
        cls,
        checkpoint: HFCheckpoint,
        arch: Architecture,
        slices: Slices | None = None,
        device: torch.device | str = "cpu",
    ) -> WeightStore:
        """Loads a checkpoint; of what `slices` do not hold only the headers are read. Raises ValueError naming a tensor
        that is missing, unknown, damaged or of a wrong shape."""
        store = cls(arch, spec_from_hf(checkpoint.config), slices, device)
        store._stored = store.pair(store._read(checkpoint))
        missing = sorted(store._shapes.keys() - store._stored.keys())
        if missing:
            raise ValueError(f"{checkpoint.path} lacks {missing[0]} ({len(missing)} weights missing): fetch it again")
        return store

    def _read(self, checkpoint: HFCheckpoint) -> Iterator[tuple[str, Tensor]]:
        """Checks every tensor and yields what is held of it."""
        for name in checkpoint.names():
            if name.endswith("rotary_emb.inv_freq") or self.skips(name):
                continue
            info = checkpoint.info(name)
            rows = self._check_header(name, torch.empty(info.shape, dtype=info.dtype, device="meta"))
            if rows is None:
                continue
            whole = len(rows) == (info.shape[0] if info.shape else 1)
            held = checkpoint.read(name) if whole else checkpoint.read_rows(name, rows.start, rows.stop)
            held = self.placed(held)
            self.check_finite(name, held)
            yield name, held

    # ---- received tensors

    def placed(self, tensor: Tensor) -> Tensor:
        """A received tensor on the store's device. The copy is complete when this returns."""
        return tensor.to(self.device)

    def skips(self, name: str) -> bool:
        """Whether a tensor is known but not served: of a multi-token-prediction layer, a head beside a tied embedding,
        or scales of activations that some formats have."""
        if self.arch.tied and name == "lm_head.weight":
            return True
        if self._codec is not None and name.rpartition(".")[2] in self._codec.dropped - self._codec.stored.keys():
            return True
        m = _LAYER.match(name)
        return m is not None and 0 <= int(m[1]) - self.arch.layers < self.arch.mtp_layers

    def check(self, name: str, tensor: Tensor) -> None:
        """Raises ValueError when a streamed tensor does not fit this model, before a slice of it is kept."""
        self._check_header(name, tensor)
        self.check_finite(name, tensor)

    def _check_header(self, name: str, tensor: Tensor) -> range | None:
        """Checks the name, shape and dtype of a whole stored tensor, which may be on the meta device -> its rows that
        are held."""
        refuse_foreign(name, tensor.dtype, self.spec)
        coded = coded_weight_of(self._codec, name, tensor.dtype)
        weight = name if coded is None else coded[0]
        want = self._expected.get(weight)
        if want is None:
            raise ValueError(f"{name} is not a weight of this model")
        covered = self.spec is not None and self.spec.covers(weight, want)
        if coded is None:
            self._check_plain(name, tensor, want, covered)
        else:
            assert self._codec is not None and self.spec is not None
            if not covered:
                raise ValueError(
                    f"{name} is a stored tensor of {self.spec.format} weights, but the quantization_config of the "
                    f"served checkpoint leaves {weight} unquantized: publish with the ignore rules of the "
                    "checkpoint"
                )
            self._codec.adopt_tensor(weight, coded[1], tensor, want)
        return self._stored_rows(weight, coded and coded[1], tensor, self.slices)

    def _check_plain(self, name: str, tensor: Tensor, want: tuple[int, ...], covered: bool) -> None:
        if tuple(tensor.shape) != want:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, but this model needs {list(want)}")
        if tensor.dtype not in _FLOATS:
            raise ValueError(f"{name} is {tensor.dtype}: weights are float32, bfloat16, float16 or quantized parts")
        if covered:
            assert self.spec is not None
            raise ValueError(
                f"{name} is {tensor.dtype}, but the quantization_config of the served checkpoint requires "
                f"{self.spec.format} codes: publish in that format, or add this module to the checkpoint's ignore "
                "rules"
            )

    def check_finite(self, name: str, tensor: Tensor) -> None:
        if coded_weight_of(self._codec, name, tensor.dtype) is None and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ValueError(f"{name} has {bad} non-finite values: check the trainer's weights")

    def _stored_rows(self, weight: str, leaf: str | None, tensor: Tensor, slices: Slices) -> range | None:
        """The rows of a whole stored tensor, of codes its `leaf`, that belong to `slices`; None: they hold nothing of
        the weight. What applies to a whole weight belongs to all that hold a part of it."""
        rows = slices.rows(weight, self._expected[weight][0])
        if rows is None or leaf is None:
            return rows
        assert self._codec is not None
        kind = self._codec.stored.get(leaf)
        if not isinstance(kind, PerBlock):
            return range(tensor.shape[0] if tensor.dim() else 1)
        return range(rows.start // kind.rows, -(-rows.stop // kind.rows))

    def cut(self, name: str, tensor: Tensor, slices: Slices) -> Tensor | None:
        """What `slices` hold of a whole stored tensor that `check` accepts: the tensor, or a copy of its rows."""
        weight, leaf = coded_weight_of(self._codec, name, tensor.dtype) or (name, None)
        rows = self._stored_rows(weight, leaf, tensor, slices)
        if rows is None or not tensor.dim() or len(rows) == len(tensor):
            return None if rows is None else tensor
        return tensor[rows.start : rows.stop].clone()

    def whole_stored(self) -> Iterator[tuple[str, torch.dtype | None, tuple[int, ...]]]:
        """Name, dtype (None: any float) and shape of every stored tensor of the model, held or not, but for those that
        the codec makes."""
        for name, shape in self._expected.items():
            if self.spec is None or self._codec is None or not self.spec.covers(name, shape):
                yield name, None, shape
                continue
            for leaf, (dtype, stored) in self._codec.layout(shape, name).items():
                if leaf not in self._codec.dropped:
                    yield stored_name(name, leaf), dtype, stored

    def rows_of(self, name: str, whole: Tensor, of: Sequence[Slices]) -> list[range | None]:
        """The rows of a whole stored tensor, which may be on the meta device, that each of `of` holds. Raises as
        `check`."""
        self._check_header(name, whole)
        weight, leaf = coded_weight_of(self._codec, name, whole.dtype) or (name, None)
        return [self._stored_rows(weight, leaf, whole, slices) for slices in of]

    def stored_tensor(self) -> Callable[[str], Tensor]:
        """A function from the name of a stored tensor to the held part of it, as received."""
        weight_of = {stored: weight for weight, names in self.stored_names().items() for stored in names}

        def find(name: str) -> Tensor:
            value = self[weight_of[name]]
            return value if isinstance(value, Tensor) else value.stored[name.rpartition(".")[2]]

        return find

    def pair(self, held: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | QuantTensor]:
        """Joins the stored tensors of each quantized weight, cut to what is held. Raises ValueError naming the
        tensor."""
        return dict(pair_stream(held, self.spec, whole=self._expected))

    def replaced(self, new: Mapping[str, Tensor | QuantTensor]) -> WeightStore:
        """A copy of the store in which `new`, checked before, replaces the weights of these names."""
        out = self.without_values()
        out._stored = self._stored | dict(new)
        out._dtypes = {n: d for n, d in self._dtypes.items() if n not in new}
        return out

    def without_values(self) -> WeightStore:
        """A store of the same model that holds nothing: `replaced` with all weights makes it complete."""
        out = copy(self)
        out._stored, out._dtypes = {}, {}
        return out

    def check_coverage(self, spec: QuantSpec | None, where: object) -> None:
        """Raises ValueError when weights stored according to `spec` are stored differently from these."""
        mine = {n for n, shape in self._expected.items() if self.spec is not None and self.spec.covers(n, shape)}
        theirs = {n for n, shape in self._expected.items() if spec is not None and spec.covers(n, shape)}
        if (own := _describe(self.spec)) != (other := _describe(spec)):
            raise ValueError(f"{where} has {other}, but this server serves {own}: start a server for it")
        if differing := sorted(mine ^ theirs):
            only = "there" if differing[0] in theirs else "here"
            raise ValueError(
                f"{where} quantizes {len(theirs)} weights, but this server {len(mine)}: {differing[0]} only "
                f"{only}; start a server for it"
            )

    # ---- held tensors

    def __getitem__(self, name: str) -> Tensor | QuantTensor:
        """The weight as received."""
        value = self._stored[name]
        return value if isinstance(value, QuantTensor) else value.to(self._dtypes.get(name, value.dtype))

    def is_coded(self, name: str) -> bool:
        return isinstance(self._stored[name], QuantTensor)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the part of the weight that is held."""
        return self._shapes[name]

    def decoded(self, name: str, dtype: torch.dtype) -> Tensor:
        """The values the model computes with, cast to `dtype`; those of codes are bf16 by definition."""
        value = self._stored[name]
        if isinstance(value, QuantTensor):
            assert self._codec is not None
            return self._codec.decode(value, torch.bfloat16).to(dtype)
        return value.to(dtype)

    def codes(self, names: Sequence[str], *, own: bool) -> Codes | None:
        """Weights of one shape, stacked, or None when one of them is not quantized.

        own: the caller keeps the stack in memory, so the store replaces its tensors by views of it.
        """
        values = [v for n in names if isinstance(v := self._stored[n], QuantTensor)]
        if len(values) < len(names):
            return None
        assert self._codec is not None
        if len(values) == 1:
            stacked = {leaf: t[None] for leaf, t in values[0].stored.items()}
        else:
            stacked = {leaf: torch.stack([v.stored[leaf] for v in values]) for leaf in values[0].stored}
        shape = values[0].shape
        if own:
            for i, name in enumerate(names):
                self._stored[name] = QuantTensor({leaf: t[i] for leaf, t in stacked.items()}, shape)
        return Codes(self._codec, stacked, (shape[0], shape[1]), len(values))

    def share(self, name: str, value: Tensor) -> None:
        """Holds `value`, which is `decoded(name, value.dtype)` and stays in memory, in place of the received tensor, if
        that can be recovered from it."""
        held = self._stored[name]
        if isinstance(held, QuantTensor):
            return
        received = self._dtypes.get(name, held.dtype)
        if value.dtype is received or (value.dtype is torch.float32 and received in (torch.bfloat16, torch.float16)):
            self._stored[name] = value
            self._dtypes[name] = received

    @property
    def whole_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every weight of the model, held or not."""
        return self._expected

    def stored_names(self) -> dict[str, tuple[str, ...]]:
        """Weight -> names of its stored tensors: its own, or those of its codes and scales."""
        return {
            name: tuple(stored_name(name, leaf) for leaf in value.stored) if isinstance(value, QuantTensor) else (name,)
            for name, value in self._stored.items()
        }

    def fp32_bytes(self) -> list[int]:
        """Size of each weight in fp32."""
        return [4 * math.prod(shape) for shape in self._expected.values()]

    def tensors(self) -> Iterator[Tensor]:
        """All tensors held."""
        for value in self._stored.values():
            if isinstance(value, QuantTensor):
                yield from value.stored.values()
            else:
                yield value

    def checksums(self) -> dict[str, str]:
        """Checksum of every tensor as received, under its stored name. They are computed from memory at each call: a
        cached hash would not show later changes."""
        out: dict[str, str] = {}
        for name in self._stored:
            out |= {stored: tensor_checksum(stored, t) for stored, t, _ in self.stored(name)}
        return out

    def stored(self, name: str, of: Sequence[Slices] = ()) -> Iterator[tuple[str, Tensor, list[range]]]:
        """What is held of a weight as received: the name of each stored tensor, its rows that are held, and the numbers
        of the rows that each of `of`, which hold a part of the weight, would hold."""
        value = self[name]
        leaves: Iterable[tuple[str | None, Tensor]]
        leaves = [(None, value)] if isinstance(value, Tensor) else value.stored.items()
        for leaf, tensor in leaves:
            rows = [self._stored_rows(name, leaf, tensor, slices) for slices in of]
            yield name if leaf is None else stored_name(name, leaf), tensor, [r for r in rows if r is not None]

    def checksum(self) -> str:
        return engine_checksum(self.checksums())


def _describe(spec: QuantSpec | None) -> str:
    if spec is None or spec.format is QuantFormat.BF16:
        return "unquantized weights"
    return f"{spec.format} weights in blocks of {spec.block[0]} x {spec.block[1]} ({spec.convention})"


@dataclass(slots=True)
class UpdateSession:
    """Tensors received between begin and end of an update. They are not served before `finish`."""

    store: WeightStore
    begun_as: str | None = None  # version given at the begin
    epoch: int = 0  # of the run whose process began it; 0: of none
    version: str | None = None
    touched: float = field(default_factory=time.monotonic)  # time of the last request of the update
    refused: str = ""  # why a tensor was refused: an incomplete update must not be finished
    received: set[str] = field(default_factory=set)  # names of stored tensors
    staged: dict[str, Tensor] = field(default_factory=dict)  # what the store holds of them
    pieces: set[int] = field(default_factory=set)  # those that have come, of an update in pieces
    of_pieces: int = 0

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.touched

    def touch(self) -> None:
        self.touched = time.monotonic()

    def add(self, name: str, tensor: Tensor) -> bool:
        """Stages what the store holds of a whole tensor; False for one that is not served. Raises ValueError when the
        tensor does not fit the model or was sent before; `finish` then raises too."""
        try:
            if self.store.skips(name):
                return False
            self.store.check(name, tensor)
            if name in self.received:
                raise ValueError(f"{name} was sent twice in one update: send each tensor once")
        except ValueError as e:
            self.refused = self.refused or str(e)
            raise
        self.received.add(name)
        if (held := self.store.cut(name, tensor, self.store.slices)) is not None:
            self.staged[name] = self.store.placed(held)
        return True

    def take(self, held: Mapping[str, Tensor]) -> None:
        """Stages stored tensors that are cut to what the store holds, whose names, shapes and dtypes fit. Raises
        ValueError for values that are not finite or a name that was sent before; `finish` then raises too."""
        try:
            for name, tensor in held.items():
                placed = self.store.placed(tensor)
                self.store.check_finite(name, placed)
                if name in self.staged:
                    raise ValueError(f"{name} was sent twice in one update: send each tensor once")
                self.staged[name] = placed
        except ValueError as e:
            self.refused = self.refused or str(e)
            raise

    def finish(self) -> dict[str, Tensor | QuantTensor]:
        """The weights to replace. Raises ValueError when a tensor was refused, codes have no scale, or a piece has not
        come."""
        if self.refused:
            raise ValueError(f"the update was dropped and the old weights remain: {self.refused}")
        if self.pieces and len(self.pieces) < self.of_pieces:
            raise ValueError(
                f"the update was dropped and the old weights remain: only {len(self.pieces)} of "
                f"{self.of_pieces} pieces arrived"
            )
        return self.store.pair(self.staged.items())  # tensors were checked in `add`
