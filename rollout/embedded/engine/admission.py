"""Admission of waiting prompts into the batch and the cache.

A starting sample reserves the pages of its longest possible answer, so a running sample is never preempted for memory.
Cached pages of the beginning of a prompt are shared by reference, and so are the pages of the prefill among the samples
of a prompt. Each sample gets a copy of the last, partly filled page; the last sample gets the original. At most one
prompt at a time has started only some of its samples, so waiting prefixes cannot block each other.

Letters: P prompt tokens.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rollout.embedded.cache.kv_cache import KVCache
from rollout.embedded.engine.requests import Entry, Job, PromptSpec
from rollout.embedded.engine.running import Rows


@dataclass(slots=True, kw_only=True, eq=False)
class Admitted:
    """Samples that were started in one call of `admit`."""

    fresh: list[Entry] = field(default_factory=list)  # to prefill
    tokens: int = 0  # to feed for them
    started: list[tuple[Entry, NDArray[np.int64]]] = field(default_factory=list)  # entries, and rows of their samples
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target) pages to copy after the prefill


class Admission:
    """The queue of waiting entries."""

    def __init__(self, cache: KVCache, rows: Rows, *, prefill_tokens: int, eos_ids: tuple[int, ...]) -> None:
        self.queue: deque[Entry] = deque()
        self.jobs: dict[int, Job] = {}  # row -> running sample
        self._cache = cache
        self._rows = rows
        self._prefill_tokens = prefill_tokens
        self._eos_ids = eos_ids

    def slots_needed(self, spec: PromptSpec) -> int:
        """Slots that the first sample needs to start in an empty cache."""
        return self._first_pages(spec, len(spec.token_ids), spec.n) * self._cache.page

    def _sample_pages(self, spec: PromptSpec, tokens: int) -> int:
        """Pages of one sample. The last token of a sample is never fed and needs no slot."""
        return self._cache.pages_for(max(tokens, spec.limit - 1))

    def _first_pages(self, spec: PromptSpec, tokens: int, samples: int) -> int:
        copied = tokens % self._cache.page != 0 and samples > 1 and spec.sampling.max_new_tokens > 0
        return self._sample_pages(spec, tokens) + copied

    def admit(self) -> Admitted:
        """Starts samples from the front of the queue as long as they fit."""
        out = Admitted()
        while self.queue and self._rows.free:
            entry = self.queue[0]
            if entry.slots is None and not self._find_pages(entry, out):
                break
            if entry.spec.sampling.max_new_tokens:
                self._place(entry, out)
                if entry.jobs:
                    break
            self.queue.popleft()
        return out

    def _find_pages(self, entry: Entry, out: Admitted) -> bool:
        """Assigns pages to the entry's tokens, cached ones first. False if there are too few, or if the step would
        exceed its limit of prefill tokens."""
        cache, p = self._cache, len(entry.tokens)
        found = cache.prefixes.find(entry.hashes[: _shareable(entry) // cache.page])
        cache.share(found)
        tokens = p - len(found) * cache.page
        late = bool(out.fresh) and out.tokens + tokens > self._prefill_tokens
        if late or cache.free_pages < self._first_pages(entry.spec, p, len(entry.jobs)) - len(found):
            cache.release(found)
            return False
        entry.pages = found + cache.take(cache.pages_for(p) - len(found))
        entry.slots = cache.slots_of(entry.pages)
        entry.cached = p - tokens
        out.fresh.append(entry)
        out.tokens += tokens
        return True

    def _place(self, entry: Entry, out: Admitted) -> None:
        """Assigns pages and a row to as many of the entry's samples as fit."""
        cache, spec, p = self._cache, entry.spec, len(entry.tokens)
        full = p // cache.page
        tail = self._sample_pages(spec, p) - full
        placed: list[Job] = []
        while entry.jobs and len(placed) < self._rows.free:
            inherits = len(entry.jobs) == 1
            new = tail - (len(entry.pages) - full) if inherits else tail
            if cache.free_pages < new:
                break
            job = entry.jobs.popleft()
            own = cache.take(new)
            if inherits:
                job.pages, entry.pages = entry.pages + own, []
            else:
                cache.share(entry.pages[:full])
                job.pages = entry.pages[:full] + own
                if len(entry.pages) > full:
                    out.copies.append((entry.pages[full], own[0]))
            if not job.retractions:
                job.cached = entry.cached if entry.logits is None and not placed else p
            placed.append(job)
        if placed:
            out.started.append((entry, self._start_rows(entry, spec, placed)))

    def _start_rows(self, entry: Entry, spec: PromptSpec, jobs: list[Job]) -> NDArray[np.int64]:
        rows = self._rows.take(len(jobs))
        slots = self._cache.slots_of([q for j in jobs for q in j.pages]).view(len(jobs), -1)
        keys = np.array([j.key for j in jobs], np.uint64)
        stops = () if spec.ignore_eos else spec.sampling.stop_token_ids + self._eos_ids
        self._rows.start(rows, spec, entry.tokens, slots, keys, stops)
        self._rows.request[rows], self._rows.request_samples[rows] = entry.group.request, entry.group.request_samples
        for job, row in zip(jobs, rows.tolist(), strict=True):
            self.jobs[row] = job
            if len(job.kept_ids):
                self._rows.logprobs[row, len(spec.token_ids) : len(entry.tokens)] = torch.from_numpy(job.kept_logprobs)
        return rows

    def drop_prefixes(self) -> None:
        """Releases the pages of waiting entries, which will be prefilled again."""
        for entry in self.queue:
            self._cache.release(entry.pages)
            entry.pages, entry.slots, entry.logits, entry.cached = [], None, None, 0


def _shareable(entry: Entry) -> int:
    """Tokens that may come from the cache: not the last, whose logits are needed, nor those whose log-probs are
    requested."""
    first = entry.spec.logprob_start
    scored = first >= 0 and entry.group.prompt_logprobs is None
    return min(len(entry.tokens) - 1, first) if scored else len(entry.tokens) - 1
