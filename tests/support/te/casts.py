"""Casts to FP8 and back of TransformerEngine's extension in PyTorch.

The package's own quantizers say which codes and scales they want, of which shapes; here they are computed. Formulas: a
tensor or block is multiplied by the largest code over its largest magnitude, in FP32, and rounded to nearest even; with
powers of two that factor is rounded down. MXFP8's factor is the power of two that is at least magnitude / 448.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.te.dtypes import torch_dtype

_BLOCK, _MX = 128, 32


def nominal_dtype(x: Any) -> torch.dtype:
    """The dtype that a tensor, quantized or not, stands for."""
    return x._dtype if hasattr(x, "_fp8_dtype") else x.dtype  # type: ignore[no-any-return]


# ---- codes and scales


def _factor(amax: Tensor, largest: float, *, power_of_2: bool, epsilon: float = 0.0) -> Tensor:
    """What a magnitude is multiplied by before it is rounded; 1 where there is none."""
    amax = amax.float().clamp(min=epsilon)
    factor = torch.where((amax == 0) | amax.isinf(), 1.0, largest / amax)
    factor = factor.clamp(max=torch.finfo(torch.float32).max)
    if power_of_2:
        factor = (factor.view(torch.int32) & -0x800000).view(torch.float32)
    return factor


def _codes(x: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest).to(dtype).view(torch.uint8)


def _largest_of(x: Tensor, rows: int, columns: int) -> Tensor:
    """Largest magnitude of each block of `rows` x `columns`; the last ones may be smaller."""
    n, k = x.shape
    padded = torch.nn.functional.pad(x.abs().float(), (0, -k % columns, 0, -n % rows))
    return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns)).amax((1, 3))  # type: ignore[no-any-return]


def _spread(blocks: Tensor, rows: int, columns: int, shape: torch.Size) -> Tensor:
    """A number for each block -> for each element."""
    return blocks.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: shape[0], : shape[1]]


def _blockwise(x: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """x [n, k] -> codes [n, k], reciprocal factors: [n / 128, k / 128], or of rows [k / 128, n]."""
    dtype, rows = torch_dtype(quantizer.dtype), _BLOCK if quantizer.block_scaling_dim == 2 else 1
    factor = _factor(
        _largest_of(x, rows, _BLOCK),
        torch.finfo(dtype).max,
        power_of_2=quantizer.force_pow_2_scales,
        epsilon=quantizer.amax_epsilon,
    )
    codes = _codes(x.float() * _spread(factor, rows, _BLOCK, x.shape), dtype)
    return codes, 1 / factor if rows > 1 else (1 / factor).t()


def _exponents(amax: Tensor, largest: float) -> Tensor:
    """e8m0 of amax / largest, rounded up: uint8."""
    bits = (amax.float() * torch.tensor(1 / largest)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    return (exponent + up).to(torch.uint8)


def _mx(x: Tensor, quantizer: Any, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """x [n, k] -> codes [n, k], exponents a group: [n / rows, k / columns]."""
    dtype = torch_dtype(quantizer.dtype)
    exponents = _exponents(_largest_of(x, rows, columns), torch.finfo(dtype).max)
    factor = torch.exp2(127.0 - exponents.float())
    return _codes(x.float() * _spread(factor, rows, columns, x.shape), dtype), exponents


def _of_tensor(x: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """codes of x's shape, reciprocal factor [1]. Delayed scaling has its factor, and notes the largest magnitude."""
    dtype, amax = torch_dtype(quantizer.dtype), _amax(x)
    if hasattr(quantizer, "force_pow_2_scales"):
        if quantizer.with_amax_reduction:
            torch.distributed.all_reduce(amax, op=torch.distributed.ReduceOp.MAX, group=quantizer.amax_reduction_group)
        factor = _factor(
            amax,
            torch.finfo(dtype).max,
            power_of_2=quantizer.force_pow_2_scales,
            epsilon=quantizer.amax_epsilon,
        )
    else:
        factor = quantizer.scale
        quantizer.amax.copy_(torch.maximum(amax, quantizer.amax))
    return _codes(x.float() * factor, dtype), (1 / factor).reshape(1)


def _amax(x: Tensor) -> Tensor:
    return x.abs().max().float().reshape(1) if x.numel() else torch.zeros(1)


def _buffers(x: Tensor, quantizer: Any) -> dict[str, Tensor]:
    """Attribute of the quantized tensor -> its codes or scales."""
    kind, flat, out = type(quantizer).__name__, x.reshape(-1, x.shape[-1]), {}
    if kind in ("Float8Quantizer", "Float8CurrentScalingQuantizer"):
        codes, out["_scale_inv"] = _of_tensor(x, quantizer)
        if quantizer.rowwise_usage:
            out["_data"] = codes
        if quantizer.columnwise_usage:
            out["_transpose"] = codes.reshape(flat.shape).t().reshape(x.shape[-1], *x.shape[:-1])
        return {name: t.contiguous() for name, t in out.items()}
    for usage, given in (("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage)):
        if not given:
            continue
        if kind == "Float8BlockQuantizer":
            codes, scales = _blockwise(flat.t() if usage == "columnwise" else flat, quantizer)
            shape = (x.shape[-1], *x.shape[:-1]) if usage == "columnwise" else x.shape
        else:
            assert kind == "MXFP8Quantizer" and not quantizer.with_2d_quantization, f"{kind} is not emulated"
            codes, scales = _mx(flat, quantizer, *((_MX, 1) if usage == "columnwise" else (1, _MX)))
            shape = x.shape
        whole = scales.new_zeros(quantizer.get_scale_shape(tuple(x.shape), columnwise=usage == "columnwise"))
        whole[: scales.shape[0], : scales.shape[1]] = scales
        out[f"_{usage}_data"], out[f"_{usage}_scale_inv"] = codes.reshape(shape).contiguous(), whole
    return out


# ---- the extension's functions


def quantize(x: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """x in the quantizer's format: a new tensor, or the codes and scales of `output`."""
    if output is not None and noop is not None and float(noop):
        return output
    found = _buffers(x.detach(), quantizer)
    if output is None:
        return _new(found, quantizer, x)
    for name, value in found.items():
        kept = getattr(output, name)
        if kept is None or kept.shape != value.shape:
            setattr(output, name, value)
        else:
            kept.copy_(value)
    if hasattr(output, "_transpose_invalid"):
        output._transpose_invalid = "_transpose" not in found
    return output


_ARGUMENTS = {"_data": "data", "_transpose": "data_transpose", "_scale_inv": "fp8_scale_inv"}


def _new(found: dict[str, Tensor], quantizer: Any, x: Tensor) -> Any:
    if hasattr(quantizer, "force_pow_2_scales") or type(quantizer).__name__ == "MXFP8Quantizer":
        made = quantizer.storage_metadata(x.dtype)
        kind, more = made["cls"], dict(made["nontensor_kwargs"])
    else:  # delayed scaling, whose quantizer has none
        from transformer_engine.pytorch import Float8Tensor, Float8TensorStorage

        kind = Float8TensorStorage if quantizer.internal else Float8Tensor
        more = {"fp8_dtype": quantizer.dtype, "quantizer": quantizer, "fake_dtype": x.dtype}
    names = ("_data", "_transpose", "_scale_inv") if "_scale_inv" in found else _ROWS_AND_COLUMNS
    tensors = {_ARGUMENTS.get(name, name[1:]): found.get(name) for name in names}
    if not quantizer.internal:
        more |= {"shape": x.shape, "dtype": x.dtype, "device": x.device}
    return kind(**tensors, **more)


_ROWS_AND_COLUMNS = tuple(f"_{usage}_{what}" for usage in ("rowwise", "columnwise") for what in ("data", "scale_inv"))


def operand(x: Any, *, columnwise: bool) -> Tensor:
    """FP32 values of a product's operand. columnwise: a quantized tensor's codes along its rows' dimension."""
    if not hasattr(x, "_fp8_dtype"):
        return x.float()  # type: ignore[no-any-return]
    dtype = torch_dtype(x._fp8_dtype)
    if hasattr(x, "_scale_inv"):
        return _whole(x, dtype) * x._scale_inv  # type: ignore[no-any-return]
    data = x._columnwise_data if columnwise else x._rowwise_data
    scales = x._columnwise_scale_inv if columnwise else x._rowwise_scale_inv
    assert data is not None, f"the operand has no {'column' if columnwise else 'row'}wise codes"
    flat = data.reshape(data.shape[0], -1) if columnwise else data.reshape(-1, data.shape[-1])
    if not hasattr(x, "_is_2D_scaled"):
        flat = data.reshape(-1, data.shape[-1])
        rows, columns = (_MX, 1) if columnwise else (1, _MX)
        factor = _spread(torch.exp2(scales.float() - 127), rows, columns, flat.shape)
        return (flat.view(dtype).float() * factor).reshape(data.shape)  # type: ignore[no-any-return]
    factor = _spread(scales if x._is_2D_scaled else scales.t(), _BLOCK if x._is_2D_scaled else 1, _BLOCK, flat.shape)
    value = flat.view(dtype).float() * factor
    return value.t().reshape(*data.shape[1:], data.shape[0]) if columnwise else value.reshape(data.shape)  # type: ignore[no-any-return]


def _whole(x: Any, dtype: torch.dtype) -> Tensor:
    """Values of codes that have one scale."""
    if x._data is not None:
        return x._data.view(dtype).float()  # type: ignore[no-any-return]
    codes = x._transpose
    return codes.view(dtype).float().flatten(1).t().reshape(*codes.shape[1:], codes.shape[0])  # type: ignore[no-any-return]


def dequantize(x: Any, dtype: Any) -> Tensor:
    """Its values, of the codes along rows if it has them."""
    return operand(x, columnwise=getattr(x, "_rowwise_data", x) is None).to(torch_dtype(dtype))


def split_quantize(
    x: Tensor, splits: Sequence[int], quantizers: Sequence[Any], *, disable_bulk_allocation: bool = False
) -> list[Any]:
    """Each part of x's rows in the format of its quantizer."""
    return [quantizer.quantize(part) for part, quantizer in zip(x.split(list(splits)), quantizers, strict=True)]


def bgrad_quantize(grad: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """(gradient of a bias, the gradient in the quantizer's format)."""
    return grad.reshape(-1, grad.shape[-1]).sum(0), quantizer.quantize(grad)


def fp8_transpose(data: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """[..., k] -> [k, ...]."""
    found = data.reshape(-1, data.shape[-1]).t().reshape(data.shape[-1], *data.shape[:-1]).contiguous()
    return found if out is None else out.copy_(found)


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    return quantize(torch.zeros(*shape, dtype=dtype), quantizer)


def compute_amax(x: Tensor, amax: Tensor) -> None:
    amax.copy_(_amax(x))


def fused_amax_and_scale_update_after_reduction(
    amaxes: Tensor, histories: Sequence[Tensor], scales: Sequence[Tensor], algorithm: str, dtype: Any, margin: float
) -> None:
    """Delayed scaling: each history takes its reduced magnitudes and moves on by one, and sets its factors."""
    largest = torch.finfo(torch_dtype(dtype)).max
    parts = amaxes.split([h.shape[1] for h in histories])
    for amax, history, scale in zip(parts, histories, scales, strict=True):
        history[0] = amax
        reached = history.amax(0) if algorithm == "max" else amax
        history.copy_(history.roll(-1, 0))
        history[0] = 0
        found = largest / reached / math.exp2(margin)
        scale.copy_(torch.where((reached > 0) & reached.isfinite(), found, scale))


def fused_multi_row_padding(x: Tensor, out: Tensor, rows: Sequence[int], padded: Sequence[int]) -> None:
    """out's parts, of `padded` rows each, become x's, of `rows`, with zeros behind."""
    for part, target, n in zip(x.split(list(rows)), out.split(list(padded)), rows, strict=True):
        target[:n], target[n:] = part, 0


def fused_multi_row_unpadding(x: Tensor, out: Tensor, padded: Sequence[int], rows: Sequence[int]) -> None:
    """The reverse."""
    for part, target, n in zip(x.split(list(padded)), out.split(list(rows)), rows, strict=True):
        target.copy_(part[:n])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "quantize": quantize,
    "dequantize": dequantize,
    "split_quantize": split_quantize,
    "bgrad_quantize": bgrad_quantize,
    "fp8_transpose": fp8_transpose,
    "create_empty_quantized_tensor": create_empty_quantized_tensor,
    "compute_amax": compute_amax,
    "fused_multi_row_padding": fused_multi_row_padding,
    "fused_multi_row_unpadding": fused_multi_row_unpadding,
    "fused_amax_and_scale_update_after_reduction": fused_amax_and_scale_update_after_reduction,
    "swizzle_scales_for_gemm_": lambda *args, **kwargs: None,  # a product here takes them as they are
}
