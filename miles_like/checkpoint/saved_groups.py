"""Writes sample groups of a checkpoint to one safetensors file, and reads the same bits back.

The file holds everything of a group: tokens, masks, log-probs, streams, candidates, routes with their checksums and
gate weights, and the prompt. All tensors of one dtype are concatenated into one tensor of that name; all other values,
and the place of each tensor, are JSON in the uint8 tensor "json" (safetensors metadata is limited to 100 MB, which the
texts of a long run's samples may exceed). A file therefore has few tensors, however many samples there are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from miles_like.types import Finish, Prompt, Sample, SampleGroup, Span
from routing_replay.trace import RoutingTrace
from routing_replay.versions import VersionSpan

JSON = "json"
_ON_DISK = {"checksums": "seals", "layer_checksums": "layer_seals"}  # fields of RoutingTrace with another name there
# fields of Sample that the file has only where they have another value
_EMPTY: Mapping[str, object] = {"spans": (), "row": 0}
ReadTensor = Callable[[tuple[str, int, Sequence[int]]], Tensor]  # (dtype, index of the first element, shape) -> tensor


def write_groups(path: Path, groups: Mapping[str, SampleGroup]) -> None:
    """Raises ValueError, naming the group, where a prompt's columns are not JSON. The groups' tensors do not change."""
    pools: dict[str, list[Tensor]] = {}
    sizes: dict[str, int] = {}

    def stored(value: Any) -> Any:
        """`value` as JSON; a tensor becomes [dtype, index of its first element in the pool, shape]."""
        if isinstance(value, Tensor):
            dtype = str(value.dtype).removeprefix("torch.")
            start = sizes.get(dtype, 0)
            pools.setdefault(dtype, []).append(value.detach().cpu().reshape(-1))
            sizes[dtype] = start + value.numel()
            return [dtype, start, list(value.shape)]
        if isinstance(value, SampleGroup | Prompt | Sample | RoutingTrace):
            own = {f.name: getattr(value, f.name) for f in fields(value)}
            empty = _EMPTY if isinstance(value, Sample) else {}
            return {_ON_DISK.get(k, k): stored(v) for k, v in own.items() if k not in empty or v != empty[k]}
        if isinstance(value, Span):
            return asdict(value)
        if isinstance(value, Mapping):
            wrong = next((k for k in value if not isinstance(k, str)), None)
            if wrong is not None:
                raise TypeError(f"key {wrong!r} is not a string")
            return {k: stored(v) for k, v in value.items()}
        if isinstance(value, tuple | list):
            return [stored(v) for v in value]
        return value

    rest = {}
    for key, group in groups.items():
        try:
            rest[key] = json.dumps(stored(group))
        except TypeError as e:
            raise ValueError(
                f"group {key} cannot be saved ({e}): every column of prompt {group.prompt.id!r} must be text, a "
                "number, or a list or object of these"
            ) from e
    text = "{" + ", ".join(f"{json.dumps(key)}: {one}" for key, one in rest.items()) + "}"
    tensors = {dtype: torch.cat(parts) for dtype, parts in pools.items()}
    save_file({**tensors, JSON: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}, path)


def read_groups(path: Path) -> dict[str, SampleGroup]:
    """The groups in the order written. Raises ValueError when the file is missing or not one of `write_groups`."""
    try:
        pools = load_file(path)
        rest = json.loads(pools[JSON].numpy().tobytes())
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError) as e:
        raise ValueError(f"{path} is damaged or missing ({e})") from e

    def tensor(place: tuple[str, int, Sequence[int]]) -> Tensor:
        dtype, start, shape = place
        n = torch.Size(shape).numel()
        # a copy: a view would keep all samples in memory until the last of them is trained
        return pools[dtype][start : start + n].reshape(shape).clone()

    try:
        return {key: _group(one, tensor) for key, one in rest.items()}
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError, OverflowError) as e:
        raise ValueError(f"{path} is damaged: it contains an invalid group ({type(e).__name__}: {e})") from e


def _check_keys(value: Mapping[str, Any], kind: type[SampleGroup | Prompt | Sample | RoutingTrace]) -> None:
    """Raises ValueError unless `value` has the keys that `write_groups` writes for a `kind`, and no others."""
    wanted = {_ON_DISK.get(f.name, f.name) for f in fields(kind)}
    if wrong := (wanted ^ set(value)) - (set(_EMPTY) if kind is Sample else set()):
        raise ValueError(f"a {kind.__name__} with or without {', '.join(sorted(wrong))}")


def _group(value: Mapping[str, Any], tensor: ReadTensor) -> SampleGroup:
    _check_keys(value, SampleGroup)
    prompt = value["prompt"]
    _check_keys(prompt, Prompt)
    return SampleGroup(
        prompt=Prompt(
            id=prompt["id"],
            token_ids=tuple(prompt["token_ids"]),
            answer=prompt["answer"],
            text=prompt["text"],
            source=prompt["source"],
            messages=tuple(prompt["messages"]),
            meta=prompt["meta"],
        ),
        samples=tuple(_sample(s, tensor) for s in value["samples"]),
        discarded=value["discarded"],
    )


def _sample(value: Mapping[str, Any], tensor: ReadTensor) -> Sample:
    _check_keys(value, Sample)
    return Sample(
        prompt_id=value["prompt_id"],
        index=value["index"],
        token_ids=tensor(value["token_ids"]),
        loss_mask=tensor(value["loss_mask"]),
        logprobs=tensor(value["logprobs"]),
        routing=None if value["routing"] is None else _trace(value["routing"], tensor),
        versions=_spans(value["versions"]),
        finish=Finish(value["finish"]),
        text=value["text"],
        reward=value["reward"],
        reward_parts=value["reward_parts"],
        streams={name: tensor(place) for name, place in value["streams"].items()},
        candidates=None if value["candidates"] is None else tensor(value["candidates"]),
        spans=tuple(Span(**span) for span in value.get("spans", ())),
        row=value.get("row", 0),
    )


def _trace(value: Mapping[str, Any], tensor: ReadTensor) -> RoutingTrace:
    _check_keys(value, RoutingTrace)
    return RoutingTrace(
        experts=tensor(value["experts"]),
        layers=tuple(value["layers"]),
        num_experts=value["num_experts"],
        checksums=None if value["seals"] is None else tensor(value["seals"]),
        layer_checksums=None if value["layer_seals"] is None else tensor(value["layer_seals"]),
        versions=None if value["versions"] is None else _spans(value["versions"]),
        weights=None if value["weights"] is None else tensor(value["weights"]),
    )


def _spans(value: Sequence[tuple[int, int, int]]) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(*span) for span in value)
