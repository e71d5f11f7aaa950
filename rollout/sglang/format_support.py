"""Weight formats that each engine can serve and update, checked before a server is started.

The facts about SGLang are from the source of its 0.5.23 wheel (srt/layers/quantization). No test runs them: they need
CUDA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from miles_like.hf.checkpoint import read_config
from quant.hf_config import spec_from_hf
from quant.registry import codec_or_none
from quant.spec import QuantFormat, QuantSpec
from rollout.config import SGLangFlags

_INT4_GROUPS = (32, 64, 128)  # group sizes of SGLang's Marlin kernels
_EMBEDDED = "or set rollout.engine = 'embedded'"


Engine = Literal["embedded", "sglang", "vllm"]


def check_served(engine: Engine, spec: QuantSpec | None, flags: SGLangFlags) -> None:
    """Raises ValueError with the remedy for a storage format that the engine cannot serve unchanged, or whose weights
    it cannot update while it runs."""
    codec_or_none(spec)
    if engine == "embedded" or spec is None:
        return
    if engine == "vllm":
        raise ValueError(
            f"a vLLM server loads {spec.format} weights, but cannot reload them while it runs, as publications "
            "require: set precision.format = 'bf16', or rollout.engine = 'sglang' or 'embedded'"
        )
    if why := _sglang_problem(spec, flags):
        raise ValueError(f"stock SGLang on {flags.gpu} (rollout.sglang.gpu) cannot serve {spec.format} weights: {why}")


def check_directory(engine: Engine, path: Path, flags: SGLangFlags) -> None:
    """`check_served` for a model directory. One without config.json passes; the server will fail with it."""
    file = path / "config.json"
    if file.exists():
        check_served(engine, spec_from_hf(read_config(path)), flags)


def _sglang_problem(spec: QuantSpec, flags: SGLangFlags) -> str:
    """Why stock SGLang cannot serve the format; empty if it can."""
    blackwell, ct = flags.gpu == "blackwell", spec.convention == "compressed-tensors"
    if spec.format is QuantFormat.FP8 and blackwell:
        return (  # requant_block_scale_ue8m0_for_deepgemm
            "DeepGEMM requires scales that are powers of two there, so it would requantize fp32-scaled weights "
            "and change a quarter of them; set precision.format = 'fp8-ue8m0', which it serves unchanged"
        )
    if spec.format is QuantFormat.INT4 and spec.block[1] not in _INT4_GROUPS:
        groups = ", ".join(map(str, _INT4_GROUPS))
        return (
            f"its kernels support groups of {groups} columns, not of {spec.block[1]}; set precision.block, {_EMBEDDED}"
        )
    if spec.format is QuantFormat.MXFP8 and ct:
        return (
            "it has no scheme for experts of compressed-tensors' mxfp8-quantized; store them in the convention "
            f"'sglang' (quant_method mxfp8), {_EMBEDDED}"
        )
    if spec.format is QuantFormat.MXFP8 and not blackwell:
        return f"MXFP8 kernels need compute capability 10.0; set rollout.sglang.gpu = 'blackwell', {_EMBEDDED}"
    if spec.format is QuantFormat.MXFP4:  # Mxfp4MoEMethod registers w13_weight, per-expert files say weight_packed
        return (
            "version 0.5.23 cannot load MXFP4 experts that are stored one by one; set precision.format = "
            f"'nvfp4', {_EMBEDDED}"
        )
    if spec.format is QuantFormat.NVFP4 and ct:  # the scheme deletes w13_weight_packed and restores nothing
        return (
            "the codes of compressed-tensors' nvfp4-pack-quantized are repacked and their names dropped, so every "
            f"later update would be ignored; store them in the convention 'modelopt', {_EMBEDDED}"
        )
    if spec.format is QuantFormat.NVFP4 and not blackwell:  # prepare_moe_nvfp4_layer_for_marlin
        return (
            "below compute capability 10.0 NVFP4 weights are repacked in place and cannot be replaced; set "
            f"rollout.sglang.gpu = 'blackwell', precision.format = 'int4', {_EMBEDDED}"
        )
    return ""
