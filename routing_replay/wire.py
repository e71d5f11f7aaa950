"""Routes and gate weights as SGLang sends them: base64 of int32, or fp32, [rows, all layers, K].

A sample of 32k tokens of DeepSeek-V3's shape has 64 MB of them. They are decoded, checked and narrowed in pieces that
stay in a core's cache, so that no int32 copy of a sample exists.

Letters: rows, L MoE layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import pybase64
import torch
from torch import Tensor

from routing_replay.ids import WIRE_BYTES, Ids, check_ids, id_dtype, out_of_range, repeat, where

Base64: TypeAlias = str | bytes | memoryview  # ASCII

_PIECE = 1 << 20  # bytes that are decoded at a time


def read_wire(
    payloads: Sequence[Base64],
    rows: Sequence[int],
    *,
    num_layers: int,
    layers: Sequence[int],
    top_k: int,
    num_experts: int,
    start: int,
    samples: Sequence[str],
) -> Tensor:
    """Checked ids [sum(rows), L, K] of several sequences' `routed_experts`; see RoutingTrace.many_from_wire."""
    narrow = np.empty((sum(rows), len(layers), top_k), np.uint8 if id_dtype(num_experts) is torch.uint8 else np.int16)
    if not _narrowed(payloads, rows, narrow, num_layers=num_layers, layers=layers, num_experts=num_experts):
        raw = [_raw(p, n, num_layers, top_k, name) for p, n, name in zip(payloads, rows, samples, strict=True)]
        wire = [np.frombuffer(own, dtype="<i4").reshape(-1, num_layers, top_k) for own in raw]
        _check_dense(wire, layers=layers, start=start, samples=samples)
        for own, name in zip(wire, samples, strict=True):
            check_ids(own[:, list(layers)], layers, num_experts, sample=name, start=start)
        raise AssertionError(f"routes of {', '.join(samples[:4])} are right one by one and wrong together")
    if top_k == 1:  # layers of zeros are a matter of a whole sample there
        for ids, name in zip(np.split(narrow, np.cumsum(rows)[:-1]), samples, strict=True):
            check_ids(ids, layers, num_experts, sample=name, start=start)
    return torch.from_numpy(narrow)


def read_wire_weights(
    payload: Base64, rows: int, *, num_layers: int, layers: Sequence[int], top_k: int, start: int, sample: str
) -> Tensor:
    """[rows, L, K] fp32: the gate weights of the routes from position `start` on, sent as base64 of fp32
    [rows, num_layers, K].

    Raises ValueError for another length, and naming sample, layer and position of a weight that is not finite.
    """
    raw = _raw(payload, rows, num_layers, top_k, sample, "routed_experts_weights")
    wire = np.frombuffer(raw, dtype="<f4").reshape(rows, num_layers, top_k)[:, list(layers)]
    wrong = ~np.isfinite(wire).all(-1)
    if wrong.any():
        row, col = divmod(int(wrong.argmax()), len(layers))
        raise ValueError(
            f"{where(sample, [layers[col]], start + row)}: gate weights {wire[row, col].tolist()} are not finite"
        )
    return torch.from_numpy(np.ascontiguousarray(wire))


def _narrowed(
    payloads: Sequence[Base64],
    rows: Sequence[int],
    to: Ids,
    *,
    num_layers: int,
    layers: Sequence[int],
    num_experts: int,
) -> bool:
    """Fill `to` [sum(rows), L, K]. False where a payload has another length, is not base64, or has an id that no router
    can have chosen, with K > 1."""
    top_k = to.shape[2]
    row_bytes = num_layers * top_k * WIRE_BYTES
    if any(_decoded_bytes(payload) != n * row_bytes for payload, n in zip(payloads, rows, strict=True)):
        return False
    first, last = layers[0], layers[-1]
    columns = slice(first, last + 1) if list(layers) == list(range(first, last + 1)) else list(layers)
    dense = [i for i in range(num_layers) if i not in set(layers)]
    at = 0
    try:
        for piece in _pieces(payloads, rows, row_bytes):
            wire = np.frombuffer(piece, dtype="<i4").reshape(-1, num_layers, top_k)
            wide, narrow = wire[:, columns], to[at : at + len(wire)]
            if (dense and wire[:, dense].any()) or out_of_range(wide, num_experts):
                return False
            narrow[:] = wide
            if top_k > 1 and repeat(narrow) is not None:
                return False
            at += len(wire)
    except ValueError:  # not base64
        return False
    return at == len(to)


def _pieces(payloads: Sequence[Base64], rows: Sequence[int], row_bytes: int) -> Iterator[bytes]:
    """The payloads, decoded, in pieces of whole rows: of a long one about `_PIECE` bytes, or several short ones."""
    step = max(1, _PIECE // row_bytes // 3) * 3  # rows; a multiple of 3 bytes is a multiple of 4 characters
    held, size = list[bytes](), 0
    for payload, n in zip(payloads, rows, strict=True):
        if held and size + n * row_bytes > _PIECE:
            yield b"".join(held)
            held, size = [], 0
        if n <= step:
            held.append(_decoded(payload))
            size += n * row_bytes
            continue
        ends = [*range(step, n, step), n]
        for begin, end in zip([0, *ends], ends, strict=False):
            yield _decoded(payload[begin * row_bytes // 3 * 4 : None if end == n else end * row_bytes // 3 * 4])
    if held:
        yield b"".join(held)


def _decoded(payload: Base64) -> bytes:
    return pybase64.b64decode(payload, validate=True)


def _decoded_bytes(payload: Base64) -> int | None:
    """None where no base64 has this length."""
    if len(payload) % 4:
        return None
    end = bytes(payload[-2:], "ascii", "replace") if isinstance(payload, str) else bytes(payload[-2:])
    return len(payload) // 4 * 3 - end.count(b"=")


def _raw(payload: Base64, rows: int, num_layers: int, top_k: int, sample: str, key: str = "routed_experts") -> bytes:
    try:
        raw = _decoded(payload)
    except ValueError as e:  # binascii.Error is one
        raise ValueError(f"sample {sample}: {key} is not base64: {e}") from None
    row_bytes = num_layers * top_k * WIRE_BYTES
    want = rows * row_bytes
    if len(raw) != want:
        raise ValueError(
            f"sample {sample}: {key} has {len(raw)} bytes = {len(raw) / row_bytes:g} rows, but its tokens need "
            f"{rows} rows x {num_layers} layers x {top_k} experts x {WIRE_BYTES} = {want}: "
            f"{'rows are missing' if len(raw) < want else 'there are too many rows'}"
        )
    return raw


def _check_dense(wire: Sequence[Ids], *, layers: Sequence[int], start: int, samples: Sequence[str]) -> None:
    """Layers without a router must be zero-filled: other ids there belong to another layer, so all may have moved."""
    for own, name in zip(wire, samples, strict=True):
        for layer in (i for i in range(own.shape[1]) if i not in layers):
            if (found := own[:, layer].any(-1)).any():
                row = int(found.argmax())
                raise ValueError(
                    f"{where(name, [layer], start + row)}: ids {own[row, layer].tolist()} in a layer without experts: "
                    "the layers are shifted, or config.json belongs to another model"
                )
