"""Conversion between Hugging Face's `quantization_config` and `QuantSpec`. Torch-free.

Each convention has one reader and one writer. A written config is read back as the same spec. Configs of other tools
are read where they are equivalent; otherwise the error names the key. Keys that do not affect how weights are stored
(observers, versions, activations that an engine quantizes dynamically) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quant.ignore import from_globs, from_names, from_regex, to_globs, to_names, to_regex
from quant.spec import QuantFormat, QuantSpec

_FP8 = {"fmt": "e4m3", "activation_scheme": "dynamic"}
_MODELOPT = ("modelopt", "modelopt_fp4")
_HERE = "quantization_config"
_GROUPS = f"{_HERE}.config_groups"

_SCHEMES: Mapping[QuantFormat, tuple[str, Mapping[str, Any]]] = {
    QuantFormat.INT4: ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group"}),
    QuantFormat.MXFP8: (
        "mxfp8-quantized",
        {"num_bits": 8, "type": "float", "strategy": "group", "scale_dtype": "torch.uint8"},
    ),
    QuantFormat.MXFP4: (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "scale_dtype": "torch.uint8"},
    ),
    QuantFormat.NVFP4: (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "tensor_group", "scale_dtype": "torch.float8_e4m3fn"},
    ),
}
"""compressed-tensors: `format`, and the required keys of `weights`."""


def spec_from_hf(config: Mapping[str, Any]) -> QuantSpec | None:
    """The spec of a whole config.json; None when the model is not quantized.

    Raises ValueError naming the key whose value is not supported.
    """
    q = config.get(_HERE)
    if q is None:
        return None
    if not isinstance(q, Mapping):
        raise ValueError(f"{_HERE} = {q!r} is not supported: it must be an object")
    method = q.get("quant_method")
    if not isinstance(method, str) or method not in _READERS:
        raise ValueError(f"{_HERE}.quant_method = {method!r} is not supported: use one of {', '.join(_READERS)}")
    return _READERS[method](q)


def spec_to_hf(spec: QuantSpec, names: Sequence[str] = ()) -> dict[str, Any]:
    """The value of `quantization_config`. names: the names of all tensors of the model. Give them for a checkpoint that
    other projects load: FP8 loaders match full module names only, and ModelOpt loaders match these most reliably.

    Raises ValueError for bf16, which has none, and for a pattern of `spec.ignore` that cannot be written without names.
    """
    if spec.format is QuantFormat.BF16:
        raise ValueError(f"{spec.format} weights have no quantization_config: leave the key out")
    return _WRITERS[spec.convention](spec, names)


def quantized_config(config: Mapping[str, Any], spec: QuantSpec | None, names: Sequence[str] = ()) -> dict[str, Any]:
    """The config.json of a model with weights stored according to `spec`; `names` and errors as in `spec_to_hf`."""
    rest = {k: v for k, v in config.items() if k != _HERE}
    return rest if spec is None or spec.format is QuantFormat.BF16 else rest | {_HERE: spec_to_hf(spec, names)}


MODELOPT_FILE = "hf_quant_config.json"


def modelopt_file(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The content of `MODELOPT_FILE` for a whole config.json; None unless its weights are stored ModelOpt's way."""
    q = config.get(_HERE)
    if not isinstance(q, Mapping) or q.get("quant_method") not in _MODELOPT or "quant_algo" not in q:
        return None
    inner = {"quant_algo": q["quant_algo"], "kv_cache_quant_algo": None, "group_size": q.get("group_size", 16)}
    producer = q.get("producer", {"name": "miles-like", "version": "1"})
    return {"producer": producer, "quantization": {**inner, "exclude_modules": q.get("ignore", [])}}


def _want(q: Mapping[str, Any], wanted: Mapping[str, Any], where: str = _HERE) -> None:
    """Raises ValueError for a key of `wanted` that is present, not null, and has another value."""
    for key, want in wanted.items():
        if q.get(key) is not None and q[key] != want:
            raise ValueError(f"{where}.{key} = {q[key]!r} is not supported: expected {want!r}")


def _refuse(q: Mapping[str, Any], keys: Sequence[str], where: str, why: str) -> None:
    """Raises ValueError, ending in `why`, for one of `keys` that is set."""
    for key in keys:
        if q.get(key):
            raise ValueError(f"{where}.{key} = {q[key]!r} is not supported: {why}")


def _object(q: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    found = q.get(key)
    if not isinstance(found, Mapping):
        raise ValueError(f"{where}.{key} = {found!r} is not supported: it must be an object")
    return found


def _names(q: Mapping[str, Any], *keys: str) -> tuple[str, ...]:
    """The list under the first of `keys` that is set; `keys` are alternative names of one key."""
    key = next((k for k in keys if q.get(k)), keys[0])
    names = q.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{_HERE}.{key} = {names!r}: it must be a list of names")
    return tuple(names)


# ---- FP8 and SGLang's MXFP8


def _read_fp8(q: Mapping[str, Any]) -> QuantSpec:
    _want(q, _FP8)
    if q.get("scale_fmt") not in (None, "float", "ue8m0"):
        raise ValueError(
            f"{_HERE}.scale_fmt = {q['scale_fmt']!r} is not supported: expected 'ue8m0', or no scale_fmt for "
            "fp32 scales"
        )
    block = q.get("weight_block_size")
    if not isinstance(block, Sequence) or len(block) != 2 or not all(type(n) is int for n in block):
        raise ValueError(
            f"{_HERE}.weight_block_size = {block!r} is not supported: it must be two sizes, for example [128, "
            "128]; per-tensor and per-channel scales are not supported"
        )
    format = QuantFormat.FP8_UE8M0 if q.get("scale_fmt") == "ue8m0" else QuantFormat.FP8
    return QuantSpec(format=format, block=(block[0], block[1]), ignore=_kept(q))


def _read_mxfp8(q: Mapping[str, Any]) -> QuantSpec:
    _want(q, _FP8 | {"scale_fmt": "ue8m0", "weight_block_size": [1, 32]})
    return QuantSpec(format=QuantFormat.MXFP8, convention="sglang", ignore=_kept(q))


def _kept(q: Mapping[str, Any]) -> tuple[str, ...]:
    return from_names(_names(q, "modules_to_not_convert", "ignored_layers"))


def _write_fp8(spec: QuantSpec, names: Sequence[str]) -> dict[str, Any]:
    mx = spec.format is QuantFormat.MXFP8
    out: dict[str, Any] = {"quant_method": "mxfp8" if mx else "fp8", **_FP8, "weight_block_size": list(spec.block)}
    if spec.format is not QuantFormat.FP8:
        out["scale_fmt"] = "ue8m0"
    if kept := to_names(spec, names):
        out["modules_to_not_convert"] = kept
    return out


# ---- compressed-tensors


def _read_compressed_tensors(q: Mapping[str, Any]) -> QuantSpec:
    _want(q, {"quantization_status": "compressed"})
    _refuse(q, ("kv_cache_scheme", "transform_config"), _HERE, "only quantized weights are supported")
    if q.get("sparsity_config"):
        _want(_object(q, "sparsity_config", _HERE), {"format": "dense"}, f"{_HERE}.sparsity_config")
    groups = _object(q, "config_groups", _HERE)
    if len(groups) != 1:
        raise ValueError(f"{_GROUPS} has {len(groups)} groups, {list(groups)}: only one format per model is supported")
    name, group = next(iter(groups)), _object(groups, next(iter(groups)), _GROUPS)
    where = f"{_GROUPS}.{name}"
    _want(group, {"targets": ["Linear"]}, where)
    _refuse(group, ("output_activations",), where, "only quantized weights are supported")
    weights = _object(group, "weights", where)
    format = _scheme_of(weights, f"{where}.weights")
    stored_as = _SCHEMES[format][0]
    _want(group, {"format": stored_as}, where)
    if group.get("format") is None:
        _want(q, {"format": stored_as})
    if format is QuantFormat.INT4:
        _refuse(group, ("input_activations",), where, "INT4 weights are only supported with bf16 inputs")
    block = (1, weights["group_size"])
    return QuantSpec(
        format=format, block=block, ignore=from_regex(_names(q, "ignore")), convention="compressed-tensors"
    )


def _scheme_of(weights: Mapping[str, Any], where: str) -> QuantFormat:
    _want(weights, {"symmetric": True, "dynamic": False}, where)
    _refuse(weights, ("actorder", "block_structure"), where, "only consecutive groups within a row are supported")
    for key, known in (("num_bits", (4, 8)), ("type", ("int", "float")), ("strategy", ("group", "tensor_group"))):
        if weights.get(key) not in known:
            wanted = " or ".join(map(repr, known))
            raise ValueError(f"{where}.{key} = {weights.get(key)!r} is not supported: expected {wanted}")
    main = ("num_bits", "type", "strategy")
    alike = [f for f, (_, s) in _SCHEMES.items() if all(s[k] == weights[k] for k in main)]
    if not alike:
        given = ", ".join(f"{k} = {weights[k]!r}" for k in main)
        raise ValueError(f"{where}: the combination {given} is not supported: expected one of {', '.join(_SCHEMES)}")
    format = alike[0]
    _want(weights, {k: v for k, v in _SCHEMES[format][1].items() if k not in main}, where)
    size = weights.get("group_size")
    fixed = None if format is QuantFormat.INT4 else QuantSpec(format=format).block[1]
    if type(size) is not int or size < 8 or size % 8 or size != (fixed or size):
        want = str(fixed) if fixed else "a multiple of 8"
        raise ValueError(f"{where}.group_size = {size!r} is not supported: {format} needs {want}")
    return format


def _write_compressed_tensors(spec: QuantSpec, names: Sequence[str]) -> dict[str, Any]:
    stored_as, scheme = _SCHEMES[spec.format]
    weights = {**scheme, "group_size": spec.block[1], "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": stored_as,  # some engines read it here, others at the top level
    }
    return {
        "quant_method": "compressed-tensors",
        "format": stored_as,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": to_regex(spec.ignore),
        "kv_cache_scheme": None,
    }


# ---- ModelOpt


def _read_modelopt(q: Mapping[str, Any]) -> QuantSpec:
    """Reads the flat form and the nested one, which hf_quant_config.json has too."""
    inner = _object(q, "quantization", _HERE) if "quantization" in q else q
    where = f"{_HERE}.quantization" if "quantization" in q else _HERE
    if inner.get("quant_algo") not in ("NVFP4", "W4A16_NVFP4"):
        raise ValueError(f"{where}.quant_algo = {inner.get('quant_algo')!r} is not supported: expected 'NVFP4'")
    _refuse(inner, ("kv_cache_quant_algo", "kv_cache_scheme"), where, "only quantized weights are supported")
    _want(inner, {"group_size": 16}, where)
    groups = _object(inner, "config_groups", where) if "config_groups" in inner else {}
    for name in groups:
        group = _object(groups, name, f"{where}.config_groups")
        _want(group, {"targets": ["Linear"]}, f"{where}.config_groups.{name}")
        weights = _object(group, "weights", f"{where}.config_groups.{name}")
        wanted = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
        _want(weights, wanted, f"{where}.config_groups.{name}.weights")
    ignore = from_globs(_names(inner, "ignore", "exclude_modules"))
    return QuantSpec(format=QuantFormat.NVFP4, ignore=ignore, convention="modelopt")


def _write_modelopt(spec: QuantSpec, names: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": spec.block[1],
        "ignore": to_globs(spec, names),
    }


_READERS: Mapping[str, Callable[[Mapping[str, Any]], QuantSpec]] = {
    "fp8": _read_fp8,
    "mxfp8": _read_mxfp8,
    "compressed-tensors": _read_compressed_tensors,
} | dict.fromkeys(_MODELOPT, _read_modelopt)
_WRITERS: Mapping[str, Callable[[QuantSpec, Sequence[str]], dict[str, Any]]] = {
    "deepseek": _write_fp8,
    "sglang": _write_fp8,
    "compressed-tensors": _write_compressed_tensors,
    "modelopt": _write_modelopt,
}
