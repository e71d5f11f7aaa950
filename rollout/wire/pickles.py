"""Pickles for stock SGLang, written opcode by opcode. This project reads none of them.

SGLang's allow-list names the globals that a pickle may contain (srt/utils/common.py, `SafeUnpickler`). Its classes are
written as names here, since this project does not import SGLang.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import torch

START, STOP = b"\x80\x04", b"."
_PLACE = b"\x00\x00\x10\x00"  # of the reader's memo, beyond those of pickled values


class Opcodes(bytes):
    """Opcodes that push one value. Plain bytes, in contrast, are a value themselves."""


class Global(NamedTuple):
    """A class or function of the reader."""

    module: str
    name: str


def pushed(value: Any) -> Opcodes:
    """The opcodes that push a global, a torch dtype, a class, or a plain value (its pickle without header and stop)."""
    if isinstance(value, Opcodes):
        return value
    if isinstance(value, torch.dtype):
        value = Global("torch", str(value).removeprefix("torch."))
    elif isinstance(value, type):
        value = Global(value.__module__, value.__qualname__)
    if isinstance(value, Global):
        return Opcodes(f"c{value.module}\n{value.name}\n".encode())
    return Opcodes(pickle.dumps(value, protocol=3)[2:-1])


def called(function: Global | Opcodes, *arguments: Any) -> Opcodes:
    """The opcodes that push the result of a call."""
    return Opcodes(pushed(function) + b"(" + b"".join(map(pushed, arguments)) + b"tR")


def kept(value: Global) -> Opcodes:
    """The opcodes that push the value and let `again` push it. One value of a pickle."""
    return Opcodes(pushed(value) + b"r" + _PLACE)


def again() -> Opcodes:
    """The opcodes that push the value of the last `kept` again."""
    return Opcodes(b"j" + _PLACE)
