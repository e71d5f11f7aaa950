"""Hugging Face's `quantization_config`, read as a `QuantSpec` and written from one. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quant.spec import QuantFormat, QuantSpec

_DEEPSEEK = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def spec_from_hf(config: Mapping[str, Any]) -> QuantSpec | None:
    """Of a whole config.json; None when the model is not quantized.

    Raises ValueError naming the key whose value is not supported.
    """
    q = config.get("quantization_config")
    if q is None:
        return None
    if not isinstance(q, Mapping):
        raise ValueError(f"quantization_config = {q!r} is not supported: it must be an object")
    method = q.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise ValueError(
            f"quantization_config.quant_method = {method!r} is not supported: those read are {', '.join(_READERS)}"
        )
    return _READERS[method](q)


def spec_to_hf(spec: QuantSpec) -> dict[str, Any]:
    """The value of `quantization_config`. Raises ValueError for bf16, which has none."""
    if spec.format is QuantFormat.BF16:
        raise ValueError(f"{spec.format} weights have no quantization_config: leave the key out")
    return _WRITERS[spec.convention](spec)


def quantized_config(config: Mapping[str, Any], spec: QuantSpec | None) -> dict[str, Any]:
    """A model's config.json for weights stored as `spec` says."""
    rest = {k: v for k, v in config.items() if k != "quantization_config"}
    return rest if spec is None or spec.format is QuantFormat.BF16 else rest | {"quantization_config": spec_to_hf(spec)}


def _want(q: Mapping[str, Any], wanted: Mapping[str, Any], where: str = "quantization_config") -> None:
    """Every key of `wanted` that is there has that value; quant_method must be there."""
    for key, want in wanted.items():
        if q.get(key, want if key != "quant_method" else None) != want:
            raise ValueError(f"{where}.{key} = {q.get(key)!r} is not supported: only {want!r} is")


def _names(q: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = q.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"quantization_config.{key} = {names!r}: it must be a list of names")
    return tuple(names)


def _read_deepseek(q: Mapping[str, Any]) -> QuantSpec:
    _want(q, _DEEPSEEK)
    if q.get("scale_fmt") not in (None, "float", "ue8m0"):
        raise ValueError(
            f"quantization_config.scale_fmt = {q['scale_fmt']!r} is not supported: 'ue8m0' is, and fp32 scales, which "
            "a config.json says by having no scale_fmt"
        )
    block = q.get("weight_block_size")
    if not isinstance(block, Sequence) or len(block) != 2 or not all(type(n) is int for n in block):
        raise ValueError(
            f"quantization_config.weight_block_size = {block!r} is not supported: "
            "it must be two sizes, as [128, 128]; per-tensor and per-channel scales are not read"
        )
    format = QuantFormat.FP8_UE8M0 if q.get("scale_fmt") == "ue8m0" else QuantFormat.FP8
    return QuantSpec(format=format, block=(block[0], block[1]), ignore=_names(q, "modules_to_not_convert"))


def _write_deepseek(spec: QuantSpec) -> dict[str, Any]:
    out: dict[str, Any] = {**_DEEPSEEK, "weight_block_size": list(spec.block)}
    if spec.format is QuantFormat.FP8_UE8M0:
        out["scale_fmt"] = "ue8m0"
    if spec.ignore:
        out["modules_to_not_convert"] = list(spec.ignore)
    return out


_READERS: Mapping[str, Callable[[Mapping[str, Any]], QuantSpec]] = {"fp8": _read_deepseek}
_WRITERS: Mapping[str, Callable[[QuantSpec], dict[str, Any]]] = {"deepseek": _write_deepseek}
