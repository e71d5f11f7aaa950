"""Chunk sizes that fit a limit on resident memory."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

MIB = 1 << 20

_PROCESS_BYTES = 320 * MIB  # resident in a fresh process with torch and its checkpoint package
# bookkeeping per tensor or piece, measured with DeepSeek-V3's 90 thousand: 2.8 KiB where the metadata is built
_NAME_BYTES, _WORKER_NAME_BYTES = 3 << 10, 3 << 9
_MOST_CHUNK, _LEAST_CHUNK = 64 * MIB, 1 * MIB


@dataclass(frozen=True, slots=True)
class Memory:
    workers: int
    chunk_bytes: int  # size of one buffer


def plan_memory(
    limit: int,
    workers: int,
    *,
    separate_process: bool = False,
    names: int = 0,
    buffers: int = 4,
    least: int = _LEAST_CHUNK,
    scratch: int = 0,
) -> Memory:
    """The chunk size for which all processes together stay within `limit` bytes of resident memory.

    It is a power of two, so that it depends little on what else a process holds: units of another chunk size cannot be
    kept. `separate_process`: even a single worker is a process beside this one. Each process has bookkeeping for
    `names` tensors and pieces; a worker holds `buffers` chunks at once, temporaries included, and `scratch` further
    bytes. `least` is the smallest usable chunk. Raises ValueError naming the smallest sufficient limit.
    """
    if workers < 1:
        raise ValueError(f"{workers} workers: use at least 1")
    processes = workers + 1 if separate_process or workers > 1 else 1
    here = max(_PROCESS_BYTES, psutil.Process().memory_info().rss)
    fixed = here + names * _NAME_BYTES + (processes - 1) * (_PROCESS_BYTES + names * _WORKER_NAME_BYTES)
    fixed += workers * scratch
    wanted = max(_LEAST_CHUNK, 1 << (least - 1).bit_length())
    chunk = min(max(_MOST_CHUNK, wanted), (limit - fixed) // (workers * buffers))
    if chunk < wanted:
        total = fixed + workers * buffers * wanted
        remedy = "a larger limit, or fewer workers" if workers > 1 else "a larger limit"
        raise ValueError(
            f"a memory limit of {limit / MIB:.0f} MiB is too small: {workers} worker(s) on this checkpoint need "
            f"at least {-(-total // MIB)} MiB; use {remedy}"
        )
    return Memory(workers, 1 << (chunk.bit_length() - 1))
