"""The running samples as a structure of arrays, so that a decode step touches no Python object a sample.

Letters: R rows, W width (tokens a row can hold), S stop tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.embedded.requests import PromptSpec
from rollout.embedded.sampler import Draw

_WIDTH = 128  # tokens a row can hold at first
_NARROW = 4  # arrays that are this many times wider than any row needs are cut to what is needed


class Rows:
    """Arrays grow for the widest row and shrink after it has ended: no request leaves memory or slowness behind."""

    def __init__(self, rows: int, *, width: int = _WIDTH) -> None:
        self.tokens = torch.zeros(rows, width, dtype=torch.int64)  # [R, W]
        self.logprobs = torch.zeros(rows, width, dtype=torch.float32)  # [R, W]
        self.slots = torch.zeros(rows, width, dtype=torch.int64)  # [R, W] cache slot of each position
        self.length = np.zeros(rows, np.int64)  # tokens known, the last sampled one included
        self.prompt = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.request = np.zeros(rows, np.int64)  # which request the sample belongs to
        self.asked = np.zeros(rows, np.int64)  # samples of that request in all
        self.key = np.zeros(rows, np.uint64)
        self.temperature = np.zeros(rows, np.float32)
        self.top_p = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.min_p = np.zeros(rows, np.float32)
        self.stop = np.full((rows, 1), -1, np.int64)  # [R, S], -1 where there is none
        self._stops = np.zeros(rows, np.int64)  # columns of `stop` that each row needs; 0: a free row
        self._needs = np.zeros(rows, np.int64)  # the same of `tokens`
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> NDArray[np.int64]:
        return np.array([self._free.pop() for _ in range(n)], np.int64)

    def release(self, rows: list[int]) -> None:
        self._free.extend(rows)
        self._stops[rows] = self._needs[rows] = 0
        self.stop[rows] = -1
        self._narrow(max(_WIDTH, int(self._needs.max())), max(1, int(self._stops.max())))

    def start(
        self,
        rows: NDArray[np.int64],
        spec: PromptSpec,
        tokens: NDArray[np.int64],
        slots: Tensor,
        keys: NDArray[np.uint64],
        stops: tuple[int, ...],
    ) -> None:
        """`rows` begin with the same `tokens` [P]; slots [len(rows), n] of each."""
        width = max(slots.shape[1], spec.limit)
        self._widen(width, len(stops))
        self._needs[rows], self._stops[rows] = width, len(stops)
        at = torch.from_numpy(rows)
        self.tokens[at, : len(tokens)] = torch.from_numpy(tokens)
        self.slots[at, : slots.shape[1]] = slots
        self.length[rows] = len(tokens)
        self.prompt[rows] = len(spec.token_ids)
        self.limit[rows] = spec.limit
        self.key[rows] = keys
        self.temperature[rows] = spec.sampling.temperature
        self.top_p[rows] = spec.sampling.top_p
        self.top_k[rows] = spec.sampling.top_k
        self.min_p[rows] = spec.sampling.min_p
        self.stop[rows] = -1
        self.stop[rows, : len(stops)] = stops

    def _widen(self, width: int, stops: int) -> None:
        r, w = self.tokens.shape
        if width > w:
            more = max(width, 2 * w) - w
            self.tokens = torch.cat([self.tokens, self.tokens.new_zeros(r, more)], 1)
            self.logprobs = torch.cat([self.logprobs, self.logprobs.new_zeros(r, more)], 1)
            self.slots = torch.cat([self.slots, self.slots.new_zeros(r, more)], 1)
        if stops > self.stop.shape[1]:
            self.stop = np.pad(self.stop, ((0, 0), (0, stops - self.stop.shape[1])), constant_values=-1)

    def _narrow(self, width: int, stops: int) -> None:
        if width * _NARROW <= self.tokens.shape[1]:
            self.tokens, self.logprobs, self.slots = (
                t[:, :width].clone() for t in (self.tokens, self.logprobs, self.slots)
            )
        if stops < self.stop.shape[1]:
            self.stop = self.stop[:, :stops].copy()

    def draw(self, rows: NDArray[np.int64]) -> Draw:
        """How the next token of each of `rows` is drawn."""
        return Draw(
            keys=self.key[rows],
            positions=self.length[rows],
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
        )

    def append(self, rows: NDArray[np.int64], tokens: Tensor, logprobs: Tensor) -> tuple[NDArray[np.bool_], ...]:
        """Adds a token to each row -> (stopped, at its limit), [len(rows)] each."""
        at, pos = torch.from_numpy(rows), torch.from_numpy(self.length[rows])
        self.tokens[at, pos] = tokens
        self.logprobs[at, pos] = logprobs
        self.length[rows] += 1
        stopped = (self.stop[rows] == tokens.numpy()[:, None]).any(1)
        return stopped, self.length[rows] >= self.limit[rows]

    def response(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Token ids and log-probs [R] sampled so far, in storage of their own."""
        part = slice(int(self.prompt[row]), int(self.length[row]))
        return self.tokens[row, part].numpy().copy(), self.logprobs[row, part].numpy().copy()
