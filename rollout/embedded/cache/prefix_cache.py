"""Prefix cache: finds full pages by their tokens, so that a further turn, a repeated prompt and a resumed sample do not
feed the same tokens twice.

The hash of a page is a digest of its tokens and of the hash of the page before it, so it identifies all tokens up to
the end of the page. The contents of a page (keys and values, expert ids, gate weights) are a function of these tokens
and of the weights: only pages that are not written to any more have a hash, and all hashes are dropped when the weights
change.

Letters: S tokens.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_DIGEST = 16  # bytes: the probability of a collision among 2^32 pages is 2^-65


class PrefixCache:
    """The map between pages and hashes. `KVCache` owns the pages and decides when they are reused."""

    def __init__(self, page: int, *, enabled: bool = True) -> None:
        """page: its number of tokens. enabled: whether pages have hashes."""
        self._page = page
        self._enabled = enabled
        self._pages: dict[bytes, int] = {}
        self._hashes: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._hashes

    def __len__(self) -> int:
        return len(self._hashes)

    def hashes(self, tokens: NDArray[np.int64]) -> list[bytes]:
        """Hashes of the pages that `tokens` [S], the first of a sequence, fill."""
        if not self._enabled:
            return []
        data, width = tokens.tobytes(), self._page * tokens.itemsize
        out, last = [], b""
        for start in range(0, len(data) - width + 1, width):
            last = blake2b(last + data[start : start + width], digest_size=_DIGEST).digest()
            out.append(last)
        return out

    def find(self, hashes: list[bytes]) -> list[int]:
        """Pages of the longest known prefix."""
        out = []
        for one in hashes:
            if one not in self._pages:
                break
            out.append(self._pages[one])
        return out

    def add(self, hashes: list[bytes], pages: list[int]) -> None:
        """Of two pages with the same hash the first one is kept."""
        for one, page in zip(hashes, pages, strict=False):
            if one not in self._pages:
                assert page not in self._hashes, f"page {page} holds other tokens"
                self._pages[one], self._hashes[page] = page, one

    def forget(self, page: int) -> None:
        if page in self._hashes:
            del self._pages[self._hashes.pop(page)]

    def clear(self) -> None:
        self._pages.clear()
        self._hashes.clear()
