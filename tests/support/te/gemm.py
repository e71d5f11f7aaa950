"""Matrix products of TransformerEngine's extension in PyTorch.

Operands are those of a column-major product, as cuBLAS takes them: with row-major tensors the result is op(B) op(A),
so "TN" of (weight, input) is input @ weight^T, "NN" of (weight, gradient) the input's gradient, and "NT" of (input,
gradient) the weight's. Quantized operands are decoded; sums are in FP32 and rounded once to the result's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from tests.support.te import casts
from tests.support.te.dtypes import torch_dtype


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _product(a: Any, transa: bool, b: Any, transb: bool) -> Tensor:
    """op(B) op(A), FP32, with the leading dimensions of B where it is not transposed."""
    left, right = casts.operand(b, columnwise=transb), casts.operand(a, columnwise=not transa)
    left2, right2 = _rows(left), _rows(right)
    out = (left2.t() if transb else left2) @ (right2.t() if transa else right2)
    return out if transb else out.reshape(*left.shape[:-1], out.shape[-1])


def generic_gemm(
    a: Any,
    transa: bool,
    b: Any,
    transb: bool,
    out: Tensor | None,
    quantizer: Any,
    out_dtype: Any,
    bias: Tensor | None,
    bias_dtype: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Tensor,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    *,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Any = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float = 0.0,
) -> tuple[Any, Tensor | None, None, None]:
    """(result, bias gradient with `grad` and a bias, None, None)."""
    assert not gelu and comm_overlap is None and extra_output is None, "not emulated"
    value = _product(a, transa, b, transb) * alpha
    bias_grad = None
    if bias is not None and grad:
        bias_grad = _rows(casts.operand(b, columnwise=transb)).sum(0).to(bias.dtype)
    elif bias is not None:
        value = value + bias.float()
    if out is None:
        found = value.to(torch_dtype(out_dtype) if out_dtype is not None else casts.nominal_dtype(b))
        return (found if quantizer is None else quantizer(found)), bias_grad, None, None
    assert math.prod(out.shape) == value.numel(), (out.shape, value.shape)
    value = value.reshape(out.shape)
    out.copy_(value + beta * out.float() if accumulate else value)
    return out, bias_grad, None, None


def te_general_grouped_gemm(
    a: Sequence[Any],
    transa: bool,
    b: Sequence[Any],
    transb: bool,
    out: Sequence[Tensor],
    out_dtype: Any,
    m_splits: Sequence[int] | None,
    bias: Sequence[Tensor],
    bias_dtype: Any,
    single_output: bool,
    gelu_in: Any,
    grad: bool,
    workspaces: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    sm_count: int,
) -> Sequence[Tensor]:
    """A product for each pair, into a tensor each, or into the rows of one; returns the biases."""
    outs = list(out)
    if single_output:
        sizes = [_rows_of(x) for x in b] if m_splits is None else [int(n) for n in m_splits]
        outs = list(out[0].split(sizes))
    for i, (left, right, target) in enumerate(zip(a, b, outs, strict=True)):
        value = _product(left, transa, right, transb).reshape(target.shape)
        if bias[i].numel() and not grad:
            value = value + bias[i].float()
        if bias[i].numel() and grad:
            bias[i].copy_(_rows(casts.operand(right, columnwise=transb)).sum(0))
        target.copy_(value + target.float() if accumulate else value)
    return bias


def _rows_of(x: Any) -> int:
    shape: Sequence[int] = x.shape if isinstance(x, Tensor) else x.size()
    return math.prod(shape[:-1])


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "generic_gemm": generic_gemm,
    "te_general_grouped_gemm": te_general_grouped_gemm,
}
