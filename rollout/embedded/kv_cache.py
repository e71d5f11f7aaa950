"""Pages of cache shared by sequences of any length.

A slot holds, for one token, what each layer's attention needs of it (a latent, or keys and values), the expert ids it
was routed to and the epoch of the weights, so that whoever shares a token's slot shares these too. A page is `page`
slots; page p has slots p * page onwards.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.embedded.architecture import Architecture


class KVCache:
    """Pages counted by reference: one may belong to all samples of a prompt."""

    def __init__(
        self,
        arch: Architecture,
        *,
        slots: int,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        width: int | None = None,
        routes: bool = True,
        gates: bool = False,
    ) -> None:
        """routes, gates: whether the experts' ids are kept, and their gate weights. Raises ValueError when the slots do
        not make a page, and for gates of experts that nobody names."""
        if slots < page:
            raise ValueError(f"{slots} cache slots are less than one page of {page}: raise max_total_tokens")
        if gates and not routes:
            raise ValueError("gate weights without the experts they are of: start with --enable-return-routed-experts")
        self.page = page
        self.pages = slots // page
        n = self.pages * page
        # Finite from the start: masked positions of a short sequence read slots that nothing was written to.
        self.values = [torch.zeros(n, width or arch.attention.cache_width, dtype=dtype) for _ in range(arch.layers)]
        routing = torch.zeros(n, arch.layers, arch.routed, dtype=torch.int32)  # zeros where there is no router
        self.routing = routing if routes else None
        self.gates = torch.zeros(routing.shape) if gates else None  # fp32, of the experts in `routing`
        # of the weights under which a slot's token was fed; the engine knows their versions
        self.epoch = 0
        self.epochs = torch.zeros(n, dtype=torch.int32)
        self._free = list(range(self.pages - 1, -1, -1))
        self._users = [0] * self.pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def take(self, n: int) -> list[int]:
        """`n` pages, each with one user. The caller has looked at `free_pages`."""
        assert n <= len(self._free), f"{n} pages asked for, {len(self._free)} free"
        out = [self._free.pop() for _ in range(n)]
        for p in out:
            self._users[p] = 1
        return out

    def share(self, pages: list[int]) -> None:
        """One more user for each."""
        for p in pages:
            assert self._users[p] > 0, f"page {p} is free"
            self._users[p] += 1

    def release(self, pages: list[int]) -> None:
        """One user less for each; a page without users is free."""
        for p in pages:
            self._users[p] -= 1
            assert self._users[p] >= 0, f"page {p} was released twice"
            if not self._users[p]:
                self._free.append(p)

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Whole pages: the last, partly filled page of a shared prompt."""
        a, b = self.slots_of(sources), self.slots_of(targets)
        for t in (*self.values, self.epochs, self.routing, self.gates):
            if t is not None:
                t.index_copy_(0, b, t.index_select(0, a))

    def slots_of(self, pages: list[int]) -> Tensor:
        """[len(pages) * page] int64, in order."""
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page
        return (first + torch.arange(self.page)).reshape(-1)
