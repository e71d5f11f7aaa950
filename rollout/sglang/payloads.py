"""The JSON of a reply to /generate, without a copy of its routes.

The routes of a sample of 32k tokens of DeepSeek-V3's shape are 85 MB of base64 in a body of 87 MB. A JSON parser reads
and copies them; here they stay where they are, and the parser gets the other 2 MB.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import orjson

_KEY = b'"routed_experts"'
_QUOTE = ord('"')
_BLANK = b" \t\r\n"
_WINDOW = 1 << 20  # bytes that are searched at a time


@contextmanager
def uncollected() -> Iterator[None]:
    """Context without automatic garbage collections, for code that makes many containers and no cycle: a reply has a
    list for each token, and a collection begins after every 700 of them."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@uncollected()
def read_generated(content: bytes | memoryview) -> Any:
    """As orjson.loads, except that the `routed_experts` of each reply's `meta_info` is a view [bytes] of `content`
    where it is a string. Raises ValueError for what is not JSON."""
    whole, kept, views = memoryview(content), list[memoryview | bytes](), list[memoryview]()
    copied = 0
    for begin, end in _strings(content):
        kept += [whole[copied:begin], b"#%d" % len(views)]
        views.append(whole[begin:end])
        copied = end
    if not views:
        return orjson.loads(content)
    body = orjson.loads(b"".join([*kept, whole[copied:]]))
    for reply in body if isinstance(body, list) else [body]:
        meta = reply.get("meta_info") if isinstance(reply, dict) else None
        if isinstance(meta, dict) and isinstance(number := meta.get("routed_experts"), str):
            meta["routed_experts"] = views[int(number[1:])]  # every string at this key is one of ours
    return body


def _strings(content: bytes | memoryview) -> list[tuple[int, int]]:
    """[begin, end) of each string that is the value of `_KEY`. Within a string of JSON that key's quotes would be
    escaped, so that it is found nowhere else."""
    found, at = [], 0
    while (at := _find(content, _KEY, at)) >= 0:
        at = _after(content, at + len(_KEY))
        if content[at : at + 1] != b":":
            continue
        at = _after(content, at + 1)
        if at < len(content) and content[at] == _QUOTE:
            end = _find(content, b'"', at + 1)
            if end < 0:  # not JSON, which the parser says
                break
            found.append((at + 1, end))
            at = end + 1
    return found


def _find(content: bytes | memoryview, what: bytes, at: int) -> int:
    """As bytes.find, which a memoryview lacks."""
    if isinstance(content, bytes):
        return content.find(what, at)
    for begin in range(at, len(content), _WINDOW):
        place = bytes(content[begin : begin + _WINDOW + len(what) - 1]).find(what)
        if place >= 0:
            return begin + place
    return -1


def _after(content: bytes | memoryview, at: int) -> int:
    """The first place from `at` on that is not blank."""
    while content[at : at + 1] and content[at] in _BLANK:
        at += 1
    return at
