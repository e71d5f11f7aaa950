"""Full pages, found again by the tokens they hold: a further turn, a repeated prompt and a resumed sample need not be
fed what was fed before.

A page's name is a digest of its tokens and of the name of the page before it, so it stands for every token up to the
page's end. What a page holds of these tokens (keys and values, expert ids, gate weights) follows from them and from the
weights; so no page that is still written to has a name, and all names are forgotten when the weights change.

Letters: S tokens.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

_DIGEST = 16  # bytes: two of 2^32 pages are called the same with a chance of 2^-65


class PrefixCache:
    """Names of pages. Whose they are, and when they are taken for something else, is the cache's business."""

    def __init__(self, page: int, *, enabled: bool = True) -> None:
        """page: tokens. Not enabled: no page has a name."""
        self._page = page
        self._enabled = enabled
        self._pages: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def __contains__(self, page: int) -> bool:
        return page in self._names

    def __len__(self) -> int:
        return len(self._names)

    def names(self, tokens: NDArray[np.int64]) -> list[bytes]:
        """Of the pages that `tokens` [S], the first of a sequence, fill."""
        if not self._enabled:
            return []
        data, width = tokens.tobytes(), self._page * tokens.itemsize
        out, name = [], b""
        for start in range(0, len(data) - width + 1, width):
            name = blake2b(name + data[start : start + width], digest_size=_DIGEST).digest()
            out.append(name)
        return out

    def find(self, names: list[bytes]) -> list[int]:
        """Pages of the longest known beginning."""
        out = []
        for name in names:
            if name not in self._pages:
                break
            out.append(self._pages[name])
        return out

    def add(self, names: list[bytes], pages: list[int]) -> None:
        """Of two pages with the same tokens the first keeps the name."""
        for name, page in zip(names, pages, strict=False):
            if name not in self._pages:
                assert page not in self._names, f"page {page} holds other tokens"
                self._pages[name], self._names[page] = page, name

    def forget(self, page: int) -> None:
        if page in self._names:
            del self._pages[self._names.pop(page)]

    def clear(self) -> None:
        self._pages.clear()
        self._names.clear()
