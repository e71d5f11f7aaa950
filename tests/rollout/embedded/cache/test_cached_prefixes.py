"""Which pages are found by their tokens, and which are taken first.

What the pages hold is no matter here: tests/laws/test_prefix_cache.py.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.embedded.cache.kv_cache import KVCache
from rollout.embedded.families.registry import architecture_of
from tests.support.exactly import MODELS
from tests.support.refusals import refuses

TEXT = np.arange(100, 120)


def cache(pages: int = 6, **how: bool) -> KVCache:
    return KVCache(architecture_of(MODELS["gqa"]), slots=4 * pages, page=4, **how)


def kept(c: KVCache, tokens: NDArray[np.int64]) -> list[int]:
    """Pages of a sequence that has ended."""
    pages = c.take(c.pages_for(len(tokens)))
    c.keep(pages, c.prefixes.hashes(tokens))
    c.release(pages)
    return pages


def found(c: KVCache, tokens: NDArray[np.int64]) -> list[int]:
    return c.prefixes.find(c.prefixes.hashes(tokens))


def test_the_longest_beginning_of_whole_pages_is_found() -> None:
    c = cache()
    pages = kept(c, TEXT[:11])
    assert c.pages_of(c.slots_of(pages)) == pages
    assert found(c, TEXT) == found(c, TEXT[:8]) == pages[:2]
    assert found(c, TEXT[:7]) == pages[:1]
    assert found(c, TEXT[:3]) == found(c, TEXT[4:]) == [], "page 1 is known behind page 0 only"
    other = TEXT.copy()
    other[5] = 0
    assert found(c, other) == pages[:1]
    assert len(c.prefixes) == 2 and c.free_pages == c.pages


def test_the_first_page_of_the_same_tokens_keeps_the_name() -> None:
    c = cache()
    first, second = c.take(2), c.take(2)
    for pages in (first, second):
        c.keep(pages, c.prefixes.hashes(TEXT[:8]))
    assert found(c, TEXT) == first
    c.release(second)
    assert c.take(2) == second, "without a name: taken first"


def test_what_was_used_longest_ago_is_taken_first_and_from_its_end() -> None:
    c = cache()
    a, b = kept(c, TEXT[:8]), kept(c, TEXT[4:12])
    unknown = sorted(set(range(c.pages)) - {*a, *b})
    c.share(found(c, TEXT[:8]))
    c.release(a)  # used again: later than b
    assert c.take(2) == unknown
    assert c.take(1) == b[1:] and found(c, TEXT[4:]) == b[:1]
    c.share(a)
    assert c.take(1) == b[:1] and c.free_pages == 0, "what is in use is not taken"
    c.release(a)
    assert c.take(2) == a[::-1] and not len(c.prefixes)


def test_pages_of_older_weights_are_not_kept_and_known_ones_are_forgotten() -> None:
    c = cache()
    kept(c, TEXT[:8])
    c.next_epoch()
    assert found(c, TEXT) == []
    kept(c, TEXT[:8])  # their slots say that they were written before
    assert found(c, TEXT) == [] and c.free_pages == c.pages
    pages = c.take(2)
    c.epochs[c.slots_of(pages)] = c.epoch
    c.keep(pages, c.prefixes.hashes(TEXT[:8]))
    assert found(c, TEXT) == pages
    c.release(pages)
    c.forget_prefixes()
    assert found(c, TEXT) == [] and c.take(6) == [0, 1, 2, 3, 4, 5]


def test_a_free_page_without_a_name_cannot_be_shared() -> None:
    c = cache(prefixes=False)
    pages = kept(c, TEXT[:8])
    assert c.prefixes.hashes(TEXT) == []
    with refuses(AssertionError, 0):
        c.share(pages)
