"""Expert ids: dtype and size, and checks for ids that no router can have chosen.

Letters: rows, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ids = NDArray[np.integer[Any]]

WIRE_BYTES = 4  # of an id on SGLang's wire
_CHUNK = 1 << 15  # rows compared at a time: they stay in a core's cache


def id_dtype(num_experts: int) -> torch.dtype:
    """Smallest dtype for expert ids 0..num_experts-1 that torch operations support: uint8, else int16.

    Not uint16: torch 2.13 has no comparison, minimum, masked assignment, gather or index_copy of uint16 on the CPU, and
    no model has more than 32768 experts. Raises ValueError for more.
    """
    if not 0 < num_experts <= 32768:
        raise ValueError(f"{num_experts} experts do not fit int16 ids")
    return torch.uint8 if num_experts <= 256 else torch.int16


def bytes_per_token(*, num_layers: int, moe_layers: int, top_k: int, num_experts: int) -> tuple[int, int]:
    """(bytes of one token's routes in a trace, bytes in SGLang's format, which is int32 for all layers)."""
    return moe_layers * top_k * id_dtype(num_experts).itemsize, num_layers * top_k * WIRE_BYTES


def payload_line(*, num_layers: int, moe_layers: int, top_k: int, num_experts: int) -> str:
    """`bytes_per_token` as a log line."""
    ours, usual = bytes_per_token(num_layers=num_layers, moe_layers=moe_layers, top_k=top_k, num_experts=num_experts)
    return f"Routing data: {ours} B/token (int32 would need {usual})"


def name_layers(layers: Sequence[int]) -> str:
    """`layer 3`, `layers 1-58`, `layers 1, 4, 7, ...`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if list(layers) == list(range(layers[0], layers[-1] + 1)):
        return f"layers {layers[0]}-{layers[-1]}"
    return f"layers {', '.join(str(i) for i in layers[:4])}{', ...' if len(layers) > 4 else ''}"


def where(sample: str, layers: Sequence[int], position: int) -> str:
    """Location of an error in a sample."""
    return f"sample {sample or '?'}, {name_layers(layers)}, position {position}"


def of_samples(samples: Sequence[str]) -> str:
    """`samples a/0, a/1, ...` of a micro-batch, at most four names: the location of an error that concerns all."""
    shown = ", ".join(s or "(filler)" for s in samples[:4])
    return f"samples {shown}{f', ... ({len(samples)})' if len(samples) > 4 else ''}"


def check_ids(ids: Ids, layers: Sequence[int], num_experts: int, *, sample: str, start: int = 0) -> None:
    """Checks ids [rows, L, K] at positions start, start + 1, ...: no layer is all zeros, every id is in range, and no
    row has an expert twice.

    An engine sends zeros for a layer that it did not capture. With K > 1 no router can choose them, however short the
    trace. With K = 1 expert 0 in every row of a layer is legal; zeros in all layers are an error where a uniform router
    would choose them with a probability below 2^-64. Raises ValueError naming sample, layer and position.
    """
    rows, count, k = ids.shape
    if not ids.size:
        return
    zero = [i for i in np.flatnonzero(ids[0].max(-1) == 0).tolist() if not ids[:, i].any()]
    if zero and (k > 1 or (len(zero) == count and rows * count * math.log2(num_experts) > 64)):
        which = where(sample, [layers[i] for i in zero], start)
        raise ValueError(f"{which}: all {rows} rows are zeros, because the engine captured no routes there")
    if out_of_range(ids, num_experts):
        row, col = divmod(int(np.argmax(((ids < 0) | (ids >= num_experts)).any(-1))), count)
        which = where(sample, [layers[col]], start + row)
        raise ValueError(f"{which}: ids {ids[row, col].tolist()} are not all within 0..{num_experts - 1}")
    if (twice := repeat(ids)) is not None:
        row, col = divmod(twice, count)
        which = where(sample, [layers[col]], start + row)
        raise ValueError(f"{which}: {ids[row, col].tolist()} has an expert twice")


def out_of_range(ids: Ids, num_experts: int) -> bool:
    """Whether an id is outside 0..num_experts-1."""
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))  # -1 becomes the largest number: one comparison, not two
    return bool(ids.size) and int(unsigned.max()) >= num_experts


def repeat(ids: Ids) -> int | None:
    """Index of the first of the rows * L lists of ids [rows, L, K] that has an expert twice; None if there is none.

    Each pair of slots is compared for many lists at once: 15 ms where sorting takes 0.2 s (32k rows of 58 x 8).
    """
    flat = ids.reshape(-1, ids.shape[-1])
    for begin in range(0, len(flat), _CHUNK):
        slots = np.ascontiguousarray(flat[begin : begin + _CHUNK].T)
        twice, equal = np.zeros(slots.shape[1], bool), np.empty(slots.shape[1], bool)
        for i in range(1, len(slots)):
            for j in range(i):
                np.logical_or(twice, np.equal(slots[i], slots[j], out=equal), out=twice)
        if twice.any():
            return begin + int(twice.argmax())
    return None
