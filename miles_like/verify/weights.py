"""Which served tensors are not those that were published, and what they are instead.

Only hashes of what is served are known. So each hypothesis is put as bytes: the tensor that was published before, the
one of the neighbouring projection, zeros, the same weight by another quantizer; the one whose hash is the served one's
is what happened, without a doubt and without moving a weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from miles_like.verify.findings import Blamed, Cause
from quant.registry import codec_or_none
from quant.spec import QuantFormat, QuantSpec
from quant.stream import stored_name

Hash = Callable[[str, Tensor], str]  # of one stored tensor under its name
_BIAS = "e_score_correction_bias"
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TRIED = 9  # coded weights, more than half of which a quantizer must have made to be named


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WeightEvidence:
    """Both sides' weights. Tensors are asked for by name and only where a hash differs.

    Without `tensor` the hashes are of what the server made of the stored tensors, as stock SGLang's are of fused ones.
    `published` are then those that such tensors of the trainer's weights have, or those that the server had after the
    trainer had published to it; nothing is known of a difference but where it is.
    """

    published: Mapping[str, str]  # stored name -> hash of what the trainer publishes
    served: Mapping[str, str]  # the same of what is served
    hash: Hash
    tensor: Callable[[str], Tensor] | None  # what the trainer publishes under a stored name
    whole: Callable[[str], Tensor]  # a weight before it is encoded, bf16
    spec: QuantSpec | None  # how the trainer publishes
    earlier: Callable[[str], Tensor | None] = field(default=lambda _: None)  # what was served at an earlier version
    difference: str = "has other values"  # what a tensor of another hash is said to be, without `tensor`
    unknown: tuple[str, ...] = ()  # served tensors of which no published hash is known

    @property
    def differing(self) -> list[str]:
        """Names of the served tensors whose hash is not the published one, in order."""
        return sorted(n for n, h in self.served.items() if self.published.get(n) != h)


def judge_weights(e: WeightEvidence) -> tuple[list[Blamed], list[Blamed]]:
    """(what is wrong with weights, what is wrong with the quantizer); each cause once, naming its tensors."""
    wrong = e.differing
    missing = sorted(n for n in e.published.keys() - e.served.keys() if n.endswith(_BIAS))
    if e.tensor is None:
        said = _listed([f"{name} {e.difference}" for name in wrong])
        return ([(Cause.WEIGHTS, said)] if wrong else []), []
    quantizer, wrong = _quantizer(e, wrong)
    causes: dict[Cause, list[str]] = {}
    for name in missing:
        causes.setdefault(Cause.EXPERT_BIAS, []).append(f"{name} is not served")
    for name in wrong:
        cause, what = _one(e, e.tensor, name)
        causes.setdefault(cause, []).append(what)
    if scales := causes.pop(Cause.SCALE_DTYPE, None):
        quantizer.append((Cause.SCALE_DTYPE, _listed(scales)))
    if not quantizer and len(causes.get(Cause.WEIGHTS, ())) == len(wrong) and _all_coded(e, wrong):
        what = f"{len(wrong)} tensors, of all weights that are coded and of no other, are of an unknown quantizer"
        return [], [(Cause.FORMAT, what)]
    return [(cause, _listed(said)) for cause, said in causes.items()], quantizer


def _listed(said: Sequence[str]) -> str:
    more = f" and {len(said) - 2} more" if len(said) > 2 else ""
    return ", ".join(said[:2]) + more


# ---- one tensor


def _one(e: WeightEvidence, tensor: Callable[[str], Tensor], name: str) -> Blamed:
    """What stands under `name` instead of what was published."""
    served = e.served[name]
    if name not in e.published:
        return Cause.WEIGHTS, f"{name} was never published"
    own = tensor(name)
    before = e.earlier(name)
    if before is not None and e.hash(name, before) == served:
        return Cause.STALE, f"{name} is the one of an earlier version"
    partner = _other_of_pair(name)
    if partner in e.published and e.hash(name, tensor(partner)) == served:
        return Cause.GATE_UP, f"{name} holds {partner}"
    if e.hash(name, torch.zeros_like(own)) == served:
        return (Cause.EXPERT_BIAS if name.endswith(_BIAS) else Cause.WEIGHTS), f"{name} is all zeros"
    for dtype in _DTYPES:
        if own.dtype in _DTYPES and dtype is not own.dtype and e.hash(name, own.to(dtype)) == served:
            cause = Cause.SCALE_DTYPE if "scale" in name.rpartition(".")[2] else Cause.WEIGHTS
            return cause, f"{name} is served as {_said(dtype)}, published as {_said(own.dtype)}"
    for other in _elsewhere(e, name):
        if e.hash(name, tensor(other)) == served:
            return Cause.MISPLACED, f"{name} holds {other}"
    return Cause.WEIGHTS, f"{name} has other values"


def _said(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _other_of_pair(name: str) -> str:
    if ".gate_proj." in name:
        return name.replace(".gate_proj.", ".up_proj.")
    return name.replace(".up_proj.", ".gate_proj.")


def _elsewhere(e: WeightEvidence, name: str) -> Iterator[str]:
    """Tensors of the same module in other layers, or of other experts of its layer."""
    numbers = list(_NUMBER.finditer(name))
    for number in numbers:
        head, tail = name[: number.start()], name[number.end() :]
        shape = re.compile(re.escape(head) + r"\d+" + re.escape(tail))
        yield from (n for n in e.published if n != name and shape.fullmatch(n))


# ---- the quantizer


def _quantizer(e: WeightEvidence, wrong: Sequence[str]) -> tuple[list[Blamed], list[str]]:
    """(what is wrong with it, the names that this does not explain)."""
    weights = list(dict.fromkeys(w for n in wrong if (w := _weight_of(n)) is not None and _has(e, w)))
    weights = [w for w in weights if _quantizable(w, e.whole(w))]
    if not weights:
        return [], list(wrong)
    tried = weights[:: -(-len(weights) // _TRIED)]
    for spec in _candidates(e.spec):
        if 2 * sum(_made_by(e, spec, w) for w in tried) > len(tried):
            made = [w for w in weights if _made_by(e, spec, w)]
            explained = {n for w in made for n in _stored(spec, w) + _stored(e.spec, w)}
            return [_blame(e.spec, spec, len(made))], [n for n in wrong if n not in explained]
    return [], list(wrong)


def _all_coded(e: WeightEvidence, wrong: Sequence[str]) -> bool:
    """Whether these are of the coded weights, of every one, and of no other tensor."""
    codec = codec_or_none(e.spec)
    if codec is None:
        return False
    scaled = "." + codec.leaves[-1]
    coded = {n.removesuffix(scaled) for n in e.published if n.endswith(scaled)}
    return len(coded) > 1 and {n.rpartition(".")[0] for n in wrong} == coded


def _weight_of(stored: str) -> str | None:
    """The whole weight that a stored name belongs to."""
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
    """Whether the served parts of a weight are those that a quantizer would have made."""
    whole = e.whole(weight)
    codec = codec_or_none(spec)
    if codec is None or not spec.covers(weight, whole.shape):
        return codec is None and e.served.get(weight) == e.hash(weight, whole)
    names = codec.bundle_of(weight)
    try:
        parts = codec.encode({n: e.whole(n) for n in names})[weight].parts
    except ValueError:  # columns that its groups do not divide
        return False
    return all(e.served.get(n) == e.hash(n, t) for n, t in ((stored_name(weight, k), t) for k, t in parts.items()))


def _candidates(spec: QuantSpec | None) -> Iterator[QuantSpec]:
    """Quantizers that other people use, those nearest to ours first."""
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


def _blame(published: QuantSpec | None, served: QuantSpec, weights: int) -> Blamed:
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
