"""Pages of cache shared by sequences of any length.

A slot holds, for one token, what each layer's attention needs of it (a latent, or keys and values), the expert ids it
was routed to and the epoch of the weights, so that whoever shares a token's slot shares these too. A page is `page`
slots; page p has slots p * page onwards. A page that nobody uses is free; if it has a name it can still be found by it,
until it is taken for other tokens: first the pages without a name, then those that were used longest ago, a prefix
after what follows it.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from rollout.embedded.architecture import Architecture
from rollout.embedded.prefix_cache import PrefixCache


class KVCache:
    """Pages counted by reference: one may belong to all samples that begin with its tokens."""

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
        prefixes: bool = True,
    ) -> None:
        """routes, gates: whether the experts' ids are kept, and their gate weights. prefixes: whether pages that were
        given back can be found again. Raises ValueError when the slots do not make a page, and for gates of experts
        that nobody names."""
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
        self.prefixes = PrefixCache(page, enabled=prefixes)
        self._free = OrderedDict.fromkeys(range(self.pages))  # the next to be taken first
        self._users = [0] * self.pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def take(self, n: int) -> list[int]:
        """`n` pages, each with one user. The caller has looked at `free_pages`."""
        assert n <= len(self._free), f"{n} pages asked for, {len(self._free)} free"
        out = [self._free.popitem(last=False)[0] for _ in range(n)]
        for p in out:
            self._users[p] = 1
            self.prefixes.forget(p)
        return out

    def share(self, pages: list[int]) -> None:
        """One more user for each."""
        for p in pages:
            if not self._users[p]:
                assert p in self.prefixes, f"page {p} is free"
                del self._free[p]
            self._users[p] += 1

    def release(self, pages: list[int]) -> None:
        """One user less for each of a sequence's pages; a page without users is free."""
        for p in reversed(pages):
            self._users[p] -= 1
            assert self._users[p] >= 0, f"page {p} was released twice"
            if not self._users[p]:
                self._free[p] = None
                if p not in self.prefixes:
                    self._free.move_to_end(p, last=False)

    def keep(self, pages: list[int], names: list[bytes]) -> None:
        """`pages`, the first of a sequence, which nobody writes to any more, can be found by their `names`: not if they
        are of older weights, or attended to such. No page of a sequence is older than its first."""
        if names and int(self.epochs[pages[0] * self.page]) == self.epoch:
            self.prefixes.add(names, pages)

    def forget_prefixes(self) -> None:
        """No page is found from now on. The lowest are taken first again: memory that was never touched stays so."""
        self.prefixes.clear()
        self._free = OrderedDict.fromkeys(sorted(self._free))

    def next_epoch(self) -> None:
        """The weights, or what they are called, are others from now on."""
        self.epoch += 1
        self.forget_prefixes()

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

    def pages_of(self, slots: Tensor) -> list[int]:
        """Of `slots_of`."""
        return [s // self.page for s in slots[:: self.page].tolist()]
