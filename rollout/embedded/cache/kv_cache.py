"""A paged KV cache, shared by sequences of any length.

A slot holds, for one token, the state of each layer's attention (a latent, or keys and values), the expert ids that the
token was routed to, and the epoch of the weights, so sequences that share a slot share these too. A page is `page`
slots; page p has slots p * page onwards. A page without users is free. A free page with a hash can still be found by
its prefix until it is allocated for other tokens: pages without a hash are allocated first, then the least recently
used, and a prefix after the pages that follow it.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

from rollout.embedded.cache.prefix_cache import PrefixCache
from rollout.embedded.device.transfers import HOST, Transfers
from rollout.embedded.families.architecture import Architecture


class KVCache:
    """Reference-counted pages: one page may belong to all samples that begin with its tokens."""

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
        transfers: Transfers = HOST,
    ) -> None:
        """routes, gates: whether to keep expert ids, and gate weights. prefixes: whether released pages can be found by
        their prefix. transfers: to the device that has the slots; their epochs are in host memory. Raises ValueError
        when the slots do not fill a page, and for gates without routes."""
        if slots < page:
            raise ValueError(f"{slots} cache slots are fewer than one page of {page}: raise max_total_tokens")
        if gates and not routes:
            raise ValueError("gate weights need the expert ids: start with --enable-return-routed-experts")
        self.page, device = page, transfers.device
        self.pages = slots // page
        n = self.pages * page
        # Zeros, so that values are finite: masked positions of a short sequence read slots that were never written.
        width = width or arch.attention.cache_width
        self.values = [torch.zeros(n, width, dtype=dtype, device=device) for _ in range(arch.layers)]
        # zeros where there is no router
        routing = torch.zeros(n, arch.layers, arch.routed, dtype=torch.int32, device=device)
        self.routing = routing if routes else None
        self.gates = torch.zeros(routing.shape, device=device) if gates else None  # fp32, of the experts in `routing`
        # epoch of the weights under which a slot's token was fed; RouteCapture maps epochs to versions
        self.epoch = 0
        self.epochs = torch.zeros(n, dtype=torch.int32)
        self.prefixes = PrefixCache(page, enabled=prefixes)
        self._transfers = transfers
        self._free = OrderedDict.fromkeys(range(self.pages))  # in the order of allocation
        self._users = [0] * self.pages

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page)

    def take(self, n: int) -> list[int]:
        """Allocates `n` pages with one user each; at most `free_pages`."""
        assert n <= len(self._free), f"{n} pages were requested, but only {len(self._free)} are free"
        out = [self._free.popitem(last=False)[0] for _ in range(n)]
        for p in out:
            self._users[p] = 1
            self.prefixes.forget(p)
        return out

    def share(self, pages: list[int]) -> None:
        """Adds a user to each page."""
        for p in pages:
            if not self._users[p]:
                assert p in self.prefixes, f"page {p} is free"
                del self._free[p]
            self._users[p] += 1

    def release(self, pages: list[int]) -> None:
        """Removes a user from each of a sequence's pages; a page without users is free."""
        for p in reversed(pages):
            self._users[p] -= 1
            assert self._users[p] >= 0, f"page {p} was released twice"
            if not self._users[p]:
                self._free[p] = None
                if p not in self.prefixes:
                    self._free.move_to_end(p, last=False)

    def keep(self, pages: list[int], hashes: list[bytes]) -> None:
        """Makes `pages`, the first of a sequence, findable by their `hashes`; they must not be written to any more.
        Pages fed under older weights, or attending to such, are not added: no page is older than its sequence's
        first."""
        if hashes and int(self.epochs[pages[0] * self.page]) == self.epoch:
            self.prefixes.add(hashes, pages)

    def forget_prefixes(self) -> None:
        """Forgets all prefixes. Free pages are allocated from the lowest on, so untouched memory stays untouched."""
        self.prefixes.clear()
        self._free = OrderedDict.fromkeys(sorted(self._free))

    def next_epoch(self) -> None:
        """Starts an epoch of the weights and forgets all prefixes. Call it after the weights or their version have
        changed."""
        self.epoch += 1
        self.forget_prefixes()

    def copy(self, sources: list[int], targets: list[int]) -> None:
        """Copies whole pages: the last, partly filled page of a shared prompt."""
        own = self.slots_of(sources), self.slots_of(targets)
        sent = self._transfers.send(*own)
        for t in self.tensors():
            a, b = own if t is self.epochs else sent
            t.index_copy_(0, b, t.index_select(0, a))

    def tensors(self) -> list[Tensor]:
        """All tensors of slots."""
        return [t for t in (*self.values, self.epochs, self.routing, self.gates) if t is not None]

    @property
    def nbytes(self) -> int:
        """Memory of the slots in bytes; 0 while it is freed."""
        return sum(t.untyped_storage().nbytes() for t in self.tensors())

    def free_memory(self) -> None:
        """Frees the memory of all slots and forgets all prefixes. Call it while no page has users, and no method that
        reads or writes slots before `allocate_memory`."""
        self.forget_prefixes()
        for t in self.tensors():
            t.untyped_storage().resize_(0)

    def allocate_memory(self) -> None:
        """Allocates the slots again, filled with zeros as in a new cache."""
        for t in self.tensors():
            t.set_(torch.zeros(t.shape, dtype=t.dtype, device=t.device).untyped_storage(), 0, t.shape, t.stride())

    def slots_of(self, pages: list[int]) -> Tensor:
        """[len(pages) * page] int64: the slots of `pages`, in order."""
        first = torch.tensor(pages, dtype=torch.int64)[:, None] * self.page
        return (first + torch.arange(self.page)).reshape(-1)

    def pages_of(self, slots: Tensor) -> list[int]:
        """The inverse of `slots_of`."""
        return [s // self.page for s in slots[:: self.page].tolist()]
