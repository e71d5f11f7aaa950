"""Checks the input of `to_megatron`: a Hugging Face checkpoint with every tensor of the family's table once, as
config.json describes it, and no other tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from megatron_bridge.convert.source import Source
from megatron_bridge.families.base import Place, Precision, TensorMap
from megatron_bridge.families.registry import family_of

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def bind(source: Source) -> tuple[TensorMap, dict[str, Place]]:
    """The model's table, and the source's tensors that repeat one of it: name -> place of the original."""
    family, config = family_of(source.hf.config), source.hf.config
    tensors = family.bind(config, mtp=True)
    copies = {copy: place for place in _tops(tensors) for copy in tensors.copies_of(place.entry) if copy in source}
    if tensors.tied:  # some releases store the head all the same
        head = next(entry for entry in family.table if _HEAD in entry.hf)
        stored = (name for name in (_HEAD, *tensors.copies_of(head)) if name in source)
        copies |= dict.fromkeys(stored, tensors.place_of(_EMBEDDING))
    if not any(place.depth is not None and place.hf_name in source for place in tensors.places()):
        tensors = family.bind(config)  # announced in config.json; a checkpoint may leave its draft layers out
    return tensors, copies


def _tops(tensors: TensorMap) -> Iterator[Place]:
    """The tensors that draft layers repeat."""
    return (place for place in tensors.places() if place.entry.copies)


def checked_places(source: Source, tensors: TensorMap) -> tuple[list[Place], tuple[str, ...]]:
    """Places of all source tensors, in the source's order, and the names to skip.

    Raises ValueError naming the first tensor that is not in the table, is missing, or whose shape or dtype differs from
    config.json.
    """
    names = source.names()
    # transformers saves the shared expert of a model that has none as tensors without elements
    absent = {name for name in names if ".shared_experts." in name and 0 in source.shape(name)}
    skipped = tuple(name for name in names if tensors.is_skipped(name) or name in absent)
    beside = set(skipped)
    places = [tensors.place_of(name) for name in names if name not in beside]
    have = {place.hf_name for place in places}
    missing = [place.hf_name for place in tensors.places() if place.hf_name not in have]
    if missing:
        raise ValueError(
            f"checkpoint lacks {len(missing)} of the model's tensors, first {missing[0]!r}: "
            "download it again, or correct config.json"
        )
    for place in places:
        shape, dtype = source.shape(place.hf_name), source.dtype(place.hf_name)
        if shape != place.shape:
            raise ValueError(
                f"tensor {place.hf_name!r} has shape {shape}, but config.json requires {place.shape}: correct "
                "config.json, or fetch the checkpoint it belongs to"
            )
        wanted = tensors.dtype(place.entry)
        widens = place.entry.precision is Precision.FP32 and dtype is torch.bfloat16
        if dtype is not wanted and not widens:
            raise ValueError(
                f"tensor {place.hf_name!r} is {dtype}, but config.json requires {wanted}: set dtype in "
                "config.json to the tensors' dtype, or fetch the checkpoint it belongs to"
            )
    return places, skipped


def check_copies(source: Source, copies: Mapping[str, Place]) -> None:
    """Raise ValueError naming a copy whose dtype or shape differs from its original's. Values are compared when the
    originals are converted."""
    for copy, place in copies.items():
        is_, of = ((source.dtype(name), source.shape(name)) for name in (copy, place.hf_name))
        if is_ != of:
            raise ValueError(
                f"tensor {copy!r} is {is_[0]} {is_[1]}, expected {of[0]} {of[1]}: {copy_of(place.hf_name)}"
            )


def copy_of(name: str) -> str:
    """The end of an error message about a tensor that differs from `name`."""
    return f"it must equal {name!r}, because Megatron stores only that one; fetch the checkpoint again"
