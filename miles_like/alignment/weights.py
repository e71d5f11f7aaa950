"""Find served tensors that differ from the published ones, and what they hold instead.

Only hashes of the served tensors are known. Each hypothesis (the previously published tensor, that of the neighbouring
projection, zeros, the same weight by another quantizer) is therefore computed as bytes and hashed; an equal hash proves
the hypothesis without a transfer of weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from miles_like.alignment.report import Cause, CauseDetail
from quant.registry import codec_or_none
from quant.spec import QuantFormat, QuantSpec
from quant.stream import stored_name

Hash = Callable[[str, Tensor], str]  # (stored name, tensor) -> hash
_BIAS = "e_score_correction_bias"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRIED = 9  # weights that each candidate quantizer is tried on; it must explain more than half of them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightEvidence:
    """Hashes of both sides' weights; tensors are loaded only where a hash differs.

    Without `tensor` the hashes are of tensors that the server derived from the stored ones, as stock SGLang's are of
    fused tensors. `published` is then computed by fusing the trainer's weights, or read from the server after the
    trainer published to it; only the location of a difference is known.
    """

    published: Mapping[str, str]  # stored name -> hash of what the trainer publishes
    served: Mapping[str, str]  # stored name -> hash of what the server holds
    hash: Hash
    tensor: Callable[[str], Tensor] | None  # stored name -> what the trainer publishes
    whole: Callable[[str], Tensor]  # weight name -> the weight before encoding, bf16
    spec: QuantSpec | None  # the trainer's format
    earlier: Callable[[str], Tensor | None] = field(default=lambda _: None)  # stored name -> an earlier version's
    difference: str = "has different values"  # text for a differing tensor where `tensor` is None
    unknown: tuple[str, ...] = ()  # served tensors without a known published hash

    @property
    def differing(self) -> list[str]:
        """Names of the served tensors whose hash is not the published one, sorted."""
        return sorted(n for n, h in self.served.items() if self.published.get(n) != h)


def compare_weights(e: WeightEvidence) -> tuple[list[CauseDetail], list[CauseDetail]]:
    """(causes in the weights, causes in the quantizer); each cause once, with its tensors."""
    wrong = e.differing
    missing = sorted(n for n in e.published.keys() - e.served.keys() if n.endswith(_BIAS))
    if e.tensor is None:
        what = _shorten([f"{name} {e.difference}" for name in wrong])
        return ([(Cause.WEIGHTS, what)] if wrong else []), []
    quantizer, wrong = _quantizer(e, wrong)
    causes: dict[Cause, list[str]] = {}
    for name in missing:
        causes.setdefault(Cause.EXPERT_BIAS, []).append(f"{name} is not served")
    for name in wrong:
        cause, what = _explain(e, e.tensor, name)
        causes.setdefault(cause, []).append(what)
    if scales := causes.pop(Cause.SCALE_DTYPE, None):
        quantizer.append((Cause.SCALE_DTYPE, _shorten(scales)))
    if not quantizer and len(causes.get(Cause.WEIGHTS, ())) == len(wrong) and _all_coded(e, wrong):
        what = f"the {len(wrong)} tensors of all quantized weights, and no others, come from an unknown quantizer"
        return [], [(Cause.FORMAT, what)]
    return [(cause, _shorten(details)) for cause, details in causes.items()], quantizer


def _shorten(details: Sequence[str]) -> str:
    more = f" and {len(details) - 2} more" if len(details) > 2 else ""
    return ", ".join(details[:2]) + more


# ---- one tensor


def _explain(e: WeightEvidence, tensor: Callable[[str], Tensor], name: str) -> CauseDetail:
    """The difference between the served tensor `name` and the published one."""
    served = e.served[name]
    if name not in e.published:
        return Cause.WEIGHTS, f"{name} was never published"
    own = tensor(name)
    before = e.earlier(name)
    if before is not None and e.hash(name, before) == served:
        return Cause.STALE, f"{name} has the values of an earlier version"
    partner = _other_of_pair(name)
    if partner in e.published and e.hash(name, tensor(partner)) == served:
        return Cause.GATE_UP, f"{name} has the values of {partner}"
    if e.hash(name, torch.zeros_like(own)) == served:
        return (Cause.EXPERT_BIAS if name.endswith(_BIAS) else Cause.WEIGHTS), f"{name} is all zeros"
    for dtype in _DTYPES:
        if own.dtype in _DTYPES and dtype is not own.dtype and e.hash(name, own.to(dtype)) == served:
            cause = Cause.SCALE_DTYPE if "scale" in name.rpartition(".")[2] else Cause.WEIGHTS
            return cause, f"{name} is served as {_dtype_name(dtype)}, but published as {_dtype_name(own.dtype)}"
    for other in _similar_names(e, name):
        if e.hash(name, tensor(other)) == served:
            return Cause.MISPLACED, f"{name} has the values of {other}"
    return Cause.WEIGHTS, f"{name} has different values"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _other_of_pair(name: str) -> str:
    if ".gate_proj." in name:
        return name.replace(".gate_proj.", ".up_proj.")
    return name.replace(".up_proj.", ".gate_proj.")


def _similar_names(e: WeightEvidence, name: str) -> Iterator[str]:
    """Tensors of the same module in other layers, or of other experts of the same layer."""
    numbers = list(_NUMBER.finditer(name))
    for number in numbers:
        head, tail = name[: number.start()], name[number.end() :]
        shape = re.compile(re.escape(head) + r"\d+" + re.escape(tail))
        yield from (n for n in e.published if n != name and shape.fullmatch(n))


# ---- the quantizer


def _quantizer(e: WeightEvidence, wrong: Sequence[str]) -> tuple[list[CauseDetail], list[str]]:
    """(cause in the quantizer, names of `wrong` that it does not explain)."""
    weights = list(dict.fromkeys(w for n in wrong if (w := _weight_of(n)) is not None and _has(e, w)))
    weights = [w for w in weights if _quantizable(w, e.whole(w))]
    if not weights:
        return [], list(wrong)
    tried = weights[:: -(-len(weights) // _TRIED)]
    for spec in _candidates(e.spec):
        if 2 * sum(_made_by(e, spec, w) for w in tried) > len(tried):
            made = [w for w in weights if _made_by(e, spec, w)]
            explained = {n for w in made for n in _stored(spec, w) + _stored(e.spec, w)}
            return [_quantizer_cause(e.spec, spec, len(made))], [n for n in wrong if n not in explained]
    return [], list(wrong)


def _all_coded(e: WeightEvidence, wrong: Sequence[str]) -> bool:
    """Whether `wrong` covers every quantized weight and no other tensor."""
    codec = codec_or_none(e.spec)
    if codec is None:
        return False
    scaled = "." + codec.leaves[-1]
    coded = {n.removesuffix(scaled) for n in e.published if n.endswith(scaled)}
    return len(coded) > 1 and {n.rpartition(".")[0] for n in wrong} == coded


def _weight_of(stored: str) -> str | None:
    """The name of the weight that a stored tensor is part of."""
    module, _, leaf = stored.rpartition(".")
    return f"{module}.weight" if leaf.startswith("weight") else None


def _has(e: WeightEvidence, weight: str) -> bool:
    return any(n in e.published for n in _stored(e.spec, weight)) or weight in e.published


def _quantizable(name: str, tensor: Tensor) -> bool:
    return QuantSpec(format=QuantFormat.FP8).covers(name, tensor.shape)


def _stored(spec: QuantSpec | None, weight: str) -> list[str]:
    codec = codec_or_none(spec)
    return [weight] if codec is None else [stored_name(weight, leaf) for leaf in codec.leaves]


def _made_by(e: WeightEvidence, spec: QuantSpec, weight: str) -> bool:
    """Whether a quantizer with `spec` produces the served parts of a weight."""
    whole = e.whole(weight)
    codec = codec_or_none(spec)
    if codec is None or not spec.covers(weight, whole.shape):
        return codec is None and e.served.get(weight) == e.hash(weight, whole)
    names = codec.bundle_of(weight)
    try:
        parts = codec.encode({n: e.whole(n) for n in names})[weight].stored
    except ValueError:  # the group size does not divide the columns
        return False
    return all(e.served.get(n) == e.hash(n, t) for n, t in ((stored_name(weight, k), t) for k, t in parts.items()))


def _candidates(spec: QuantSpec | None) -> Iterator[QuantSpec]:
    """Quantizers in common use, the most similar to `spec` first."""
    ignore = () if spec is None else spec.ignore
    formats = [f for f in QuantFormat if f is not QuantFormat.BF16]
    if spec is not None and spec.format in formats:
        formats.sort(key=lambda f: f is not spec.format)
    for f in formats:
        for block in _BLOCKS.get(f, ((0, 0),)):
            out = QuantSpec(format=f, block=block, ignore=ignore)
            if spec is not None and f is spec.format:
                out = replace(out, convention=spec.convention)
            if out != spec:
                yield out
        if spec is not None and f is not spec.format and {f, spec.format} <= set(_SCALES):
            yield QuantSpec(format=f, block=spec.block, ignore=ignore)
    if spec is not None:
        yield QuantSpec(format=QuantFormat.BF16)


_FP8_BLOCKS = ((128, 128), (64, 64), (32, 32), (16, 16), (1, 128))
_BLOCKS: Mapping[QuantFormat, tuple[tuple[int, int], ...]] = {
    QuantFormat.FP8: _FP8_BLOCKS,
    QuantFormat.FP8_UE8M0: _FP8_BLOCKS,
    QuantFormat.INT4: ((1, 32), (1, 64), (1, 128), (1, 16), (1, 256)),
}
_SCALES = {QuantFormat.FP8: "fp32", QuantFormat.FP8_UE8M0: "powers of two"}


def _quantizer_cause(published: QuantSpec | None, served: QuantSpec, weights: int) -> CauseDetail:
    of = f"in {weights} weights"
    if published is None or (
        published.format is not served.format and {published.format, served.format} - set(_SCALES)
    ):
        was = "bf16" if published is None else published.format.value
        return Cause.FORMAT, f"published as {was}, served as {served.format.value}, {of}"
    if published.format is not served.format:
        scales = f"published with scales in {_SCALES[published.format]}, served with {_SCALES[served.format]}"
        return Cause.SCALE_DTYPE, f"{scales}, {of}"
    (r, c), (rows, columns) = published.block, served.block
    return Cause.GROUP_SIZE, f"published in groups of {r} x {c}, served in groups of {rows} x {columns}, {of}"
