"""What a format stores for a weight: names, dtypes and shapes, and the checks of tensors that were read.

Letters: n rows (out), k columns (in).
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Container, Mapping, Sequence

from torch import Tensor

from quant.formats.quant_tensor import Layout, PerBlock, PerWeight, QuantTensor
from quant.spec import QuantSpec


class StoredTensors(ABC):
    """`stored` maps the last component ("leaf") of each stored tensor's name to its dtype and shape."""

    stored: Mapping[str, PerBlock | PerWeight]
    dropped: frozenset[str] = frozenset()  # leaves that are not read; the codec generates those that are in `stored`

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec
        self.block = spec.block

    def _whole(self, shape: tuple[int, ...], top: Tensor | None) -> dict[str, Tensor]:
        """The `PerWeight` tensors of B weights of one shape, [B, ...] or broadcast over B."""
        return {}

    def _check_values(self, name: str, stored: Mapping[str, Tensor]) -> None:  # noqa: B027 - most need none
        """Raises ValueError naming a stored tensor with invalid values."""

    def _check_whole(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int]) -> None:  # noqa: B027
        """Raises ValueError for a `PerWeight` tensor that contradicts the shape of the whole weight."""

    @property
    def leaves(self) -> tuple[str, ...]:
        return tuple(self.stored)

    def bundle_of(self, name: str) -> tuple[str, ...]:
        """All weights that must be encoded together with `name`, including it, in the same order for each of them."""
        return (name,)

    def layout(self, shape: Sequence[int], name: str = "a weight") -> Layout:
        """Dtypes and shapes of the tensors stored for a weight [n, k]. Raises ValueError for a shape that the format
        cannot hold."""
        self._check_shape(name, shape)
        n, k = shape
        return {
            leaf: (p.dtype, (-(-n // p.rows), -(-k // p.columns))) if isinstance(p, PerBlock) else (p.dtype, p.shape)
            for leaf, p in self.stored.items()
        }

    def check_bundle(self, name: str, coded: Container[str]) -> None:
        """Raises ValueError where `name` would be stored without a weight that it shares a scale with, or where engines
        need a shared scale that the format does not have."""
        for other in self.bundle_of(name):
            if other not in coded:
                raise ValueError(f"{name} shares a scale with {other}, which is not quantized: quantize or ignore both")

    def shape_of(self, stored: Mapping[str, Tensor | tuple[int, ...]], name: str = "a weight") -> tuple[int, int]:
        """[n, k] of the weight, from the stored codes or their shape. Raises ValueError for codes that are not 2-D."""
        (leaf, kind), codes = next(iter(self.stored.items())), stored[next(iter(self.stored))]
        assert isinstance(kind, PerBlock)
        shape = tuple(codes.shape) if isinstance(codes, Tensor) else codes
        if len(shape) != 2:
            raise ValueError(f"{name}: {self.spec.format} codes ({leaf}) must be 2-D, but their shape is {list(shape)}")
        return shape[0] * kind.rows, shape[1] * kind.columns

    def _check_shape(self, name: str, shape: Sequence[int]) -> None:
        if len(shape) != 2 or not all(shape):
            raise ValueError(
                f"{name}: {self.spec.format} supports 2-D weights, but this shape is {list(shape)}: exclude the "
                "weight (ignore)"
            )
        bn, bk = self.block
        if bn == 1 and shape[1] % bk:
            raise ValueError(
                f"{name}: {shape[1]} columns are not a multiple of {self.spec.format}'s group of {bk} that shares "
                "a scale: choose a smaller group, or exclude the weight (ignore)"
            )

    def adopt(self, name: str, stored: Mapping[str, Tensor], shape: tuple[int, int] | None = None) -> QuantTensor:
        """Stored tensors, read from a file or received -> the weight. shape: of the whole weight, where the tensors
        hold only some of its rows of blocks. Raises ValueError naming a tensor of a wrong shape or dtype, or with
        values that no encoder writes."""
        q = self.fit(name, stored)
        self._check_values(name.removesuffix(".weight"), q.stored)
        self._check_whole(name.removesuffix(".weight"), q.stored, shape or (q.shape[0], q.shape[1]))
        return q

    def fit(self, name: str, stored: Mapping[str, Tensor]) -> QuantTensor:
        """As `adopt`, without reading values: accepts tensors on the meta device."""
        shape = self.shape_of(stored, name)
        found: dict[str, Tensor] = {}
        for leaf in self.layout(shape, name):
            if leaf in self.dropped:
                found[leaf] = self._whole(shape, None)[leaf]
            else:
                found[leaf] = self.adopt_tensor(name, leaf, stored[leaf], shape)
        return QuantTensor(found, shape)

    def adopt_tensor(self, name: str, leaf: str, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """One stored tensor of the weight `name` [n, k], as this codec writes it. Raises ValueError for a wrong shape
        or dtype."""
        dtype, want = self.layout(shape, name)[leaf]
        fit = self._accept(leaf, tensor)
        if tuple(fit.shape) != want or fit.dtype != dtype:
            module = name.removesuffix(".weight")
            raise ValueError(
                f"{module}.{leaf}: {tensor.dtype} {tuple(tensor.shape)}; a weight {tuple(shape)} in "
                f"{self.spec.format} blocks of {self.block} needs {str(dtype).removeprefix('torch.')} {want}: "
                "check that the quantization_config in config.json belongs to these weights"
            )
        return fit

    def _accept(self, leaf: str, tensor: Tensor) -> Tensor:
        """Converts other dtypes and shapes that are read too to those that this codec writes."""
        return tensor
