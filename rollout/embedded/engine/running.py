"""The running samples as a structure of arrays, so that a decode step touches no Python object per sample.

Letters: R rows, W width (tokens a row can hold), S stop tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.embedded.engine.requests import PromptSpec
from rollout.embedded.engine.sampler import Draw

_WIDTH = 128  # initial number of tokens per row
_NARROW = 4  # arrays this many times wider than any row needs are shrunk


class Rows:
    """Arrays grow for the widest row and shrink after it has ended, so a long request has no lasting cost."""

    def __init__(self, rows: int, *, width: int = _WIDTH) -> None:
        self.tokens = torch.zeros(rows, width, dtype=torch.int64)  # [R, W]
        self.logprobs = torch.zeros(rows, width, dtype=torch.float32)  # [R, W]
        self.slots = torch.zeros(rows, width, dtype=torch.int64)  # [R, W] cache slot of each position
        self.length = np.zeros(rows, np.int64)  # number of tokens, including the last sampled one
        self.prompt = np.zeros(rows, np.int64)
        self.limit = np.zeros(rows, np.int64)
        self.request = np.zeros(rows, np.int64)  # number of the request that the sample belongs to
        self.request_samples = np.zeros(rows, np.int64)  # samples of that request
        self.key = np.zeros(rows, np.uint64)
        self.temperature = np.zeros(rows, np.float32)
        self.top_p = np.zeros(rows, np.float32)
        self.top_k = np.zeros(rows, np.int64)
        self.min_p = np.zeros(rows, np.float32)
        self.stop = np.full((rows, 1), -1, np.int64)  # [R, S] stop tokens, padded with -1
        self.watched = np.zeros(rows, np.bool_)
        self._stops = np.zeros(rows, np.int64)  # columns of `stop` that each row needs; 0: a free row
        self._needs = np.zeros(rows, np.int64)  # columns of `tokens` that each row needs
        self._free = list(range(rows - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, n: int) -> NDArray[np.int64]:
        return np.array([self._free.pop() for _ in range(n)], np.int64)

    def release(self, rows: list[int]) -> None:
        self._free.extend(rows)
        self._stops[rows] = self._needs[rows] = 0
        self.watched[rows] = False
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
        """Starts `rows`, all with the same `tokens` [P]. slots: [len(rows), n]."""
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
        self.watched[rows] = spec.watch is not None

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
        """The sampling parameters of the next token of each of `rows`."""
        return Draw(
            keys=self.key[rows],
            positions=self.length[rows],
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            min_p=self.min_p[rows],
        )

    def append(self, rows: NDArray[np.int64], tokens: Tensor, logprobs: Tensor) -> tuple[NDArray[np.bool_], ...]:
        """Appends a token to each row -> (stopped, at its limit), [len(rows)] each."""
        at, pos = torch.from_numpy(rows), torch.from_numpy(self.length[rows])
        self.tokens[at, pos] = tokens
        self.logprobs[at, pos] = logprobs
        self.length[rows] += 1
        stopped = (self.stop[rows] == tokens.numpy()[:, None]).any(1)
        return stopped, self.length[rows] >= self.limit[rows]

    def response(self, row: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Copies of the token ids and log-probs [R] sampled so far."""
        sampled = slice(int(self.prompt[row]), int(self.length[row]))
        return self.tokens[row, sampled].numpy().copy(), self.logprobs[row, sampled].numpy().copy()
