"""Parameters and buffers of TransformerEngine's modules, as in transformer_engine/pytorch/module/*.py of 2.6."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Module(torch.nn.Module):
    """TransformerEngineBaseModule: keeps an FP8 state, empty without FP8, in every state dict."""

    fp8 = fp8_calibration = False

    def __init__(self) -> None:
        super().__init__()
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        assert state is None or state.numel() == 0, "this stand-in has no FP8 state"

    def init_fp8_metadata(self, num_gemms: int = 1) -> None: ...

    def _parameter(self, name: str, *shape: int, dtype: torch.dtype) -> None:
        self.register_parameter(name, torch.nn.Parameter(torch.zeros(*shape, dtype=dtype)))


def _share(out_features: int, in_features: int, tp_size: int, parallel_mode: str | None) -> tuple[int, int]:
    if parallel_mode == "column":
        return out_features // tp_size, in_features
    if parallel_mode == "row":
        return out_features, in_features // tp_size
    return out_features, in_features


class Linear(_Module):
    weight: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        params_dtype: torch.dtype,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert not bias
        self.parallel_mode, self.use_bias = parallel_mode, bias
        self.in_features, self.out_features = in_features, out_features
        self._parameter("weight", *_share(out_features, in_features, tp_size, parallel_mode), dtype=params_dtype)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return x @ self.weight.t()


class LayerNormLinear(Linear):
    def __init__(
        self, in_features: int, out_features: int, *, normalization: str, params_dtype: torch.dtype, **kwargs: Any
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **kwargs)
        self._parameter("layer_norm_weight", in_features, dtype=params_dtype)
        if normalization != "RMSNorm":
            self._parameter("layer_norm_bias", in_features, dtype=params_dtype)


class GroupedLinear(_Module):
    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        params_dtype: torch.dtype,
        tp_size: int = 1,
        parallel_mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        assert not bias
        self.num_gemms, self.use_bias = num_gemms, bias
        for i in range(num_gemms):
            shape = _share(out_features, in_features, tp_size, parallel_mode)
            self._parameter(f"weight{i}", *shape, dtype=params_dtype)

    def forward(self, x: Tensor, m_splits: list[int], **kwargs: Any) -> Tensor:
        weights = [getattr(self, f"weight{i}") for i in range(self.num_gemms)]  # as the real one takes them
        return torch.cat([part @ w.t() for part, w in zip(x.split(m_splits), weights, strict=True)])


class RMSNorm(torch.nn.Module):
    def __init__(self, hidden_size: int, *, params_dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=params_dtype))


class LayerNorm(RMSNorm):
    def __init__(self, hidden_size: int, *, params_dtype: torch.dtype, **kwargs: Any) -> None:
        super().__init__(hidden_size, params_dtype=params_dtype, **kwargs)
        self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype))


class DotProductAttention(_Module):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
