"""TransformerEngine's compiled half, the module `transformer_engine_torch`, emulated for a machine without CUDA.

Enumerations have the names that the package asks for; functions are those of `gemm`, `norms`, `attention`,
`context_parallel`, `casts`, `rope` and `optimizers`, written in PyTorch. Any other function can be looked up, as the
package does when it is imported, and raises NotImplementedError when it is called. Nothing here imports this project.
"""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from typing import Any

from tests.support.te import attention, casts, context_parallel, gemm, norms, optimizers, rope

NAME = "transformer_engine_torch"

DType = enum.IntEnum("DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1", start=0)
NVTE_Fused_Attn_Backend = enum.IntEnum(
    "NVTE_Fused_Attn_Backend", {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2}
)
# places of a linear's quantizers in a list: of each product input, weight and output, or gradients of output and input
FP8FwdTensors = enum.IntEnum(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    start=0,
)
FP8BwdTensors = enum.IntEnum(
    "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3", start=0
)


class _Numbered(type):
    """The members of an enumeration: distinct integers, in the order in which the package asks for them."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        members = cls.__dict__["members"]
        member: int = members.setdefault(name, len(members))
        return member


class Extension(types.ModuleType):
    """The module. functions: what it computes; `called`: its name -> number of calls."""

    def __init__(self, functions: dict[str, Callable[..., Any]]) -> None:
        super().__init__(NAME)
        self.DType, self.NVTE_Fused_Attn_Backend = DType, NVTE_Fused_Attn_Backend
        self.FP8FwdTensors, self.FP8BwdTensors = FP8FwdTensors, FP8BwdTensors
        self.called: dict[str, int] = {}
        for name, function in functions.items():
            setattr(self, name, self.counted(name, function))

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.called[name] = self.called.get(name, 0) + 1
            return function(*args, **kwargs)

        return call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made: Any = _Numbered(name, (), {"members": {}}) if name[0].isupper() else _missing(name)
        setattr(self, name, made)
        return made


def _missing(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{NAME}.{name} is not emulated: add it to tests/support/te")

    return call


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def make() -> Extension:
    """The module, with every function that is emulated."""
    machine: dict[str, Callable[..., Any]] = {
        "get_cublasLt_version": _constant(130_000),
        "get_cudnn_version": _constant(91_900),
        "get_num_cublas_streams": _constant(4),
        "device_supports_multicast": _constant(False),
        # looked up in a module that imports `*` from this one, so they have to be here
        "layernorm_fwd": _missing("layernorm_fwd"),
        "layernorm_bwd": _missing("layernorm_bwd"),
    }
    return Extension(
        machine
        | gemm.FUNCTIONS
        | norms.FUNCTIONS
        | attention.FUNCTIONS
        | context_parallel.FUNCTIONS
        | casts.FUNCTIONS
        | rope.FUNCTIONS
        | optimizers.FUNCTIONS
    )
