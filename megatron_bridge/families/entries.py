"""What the families' tables and checks have in common."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_bridge.families.base import Entry, HFConfig, Split


def linear(hf: str, megatron: str, shape: tuple[str, str], split: Split, **more: Any) -> Entry:
    """A parallel linear without bias."""
    return Entry(hf=(hf + ".weight",), megatron=megatron + ".weight", shapes=(shape,), split=split, linear=True, **more)


def norm(hf: str, megatron: str, size: str, *, stored: str | None = None, **more: Any) -> Entry:
    """An RMSNorm. `stored`: its name in checkpoints, where that differs."""
    return Entry(hf=(hf + ".weight",), megatron=megatron + ".weight", shapes=((size,),), stored=stored, **more)


def swiglu(hf: str, megatron: str, width: str, **more: Any) -> tuple[Entry, Entry]:
    """gate_proj and up_proj, which Megatron holds as one linear, and down_proj."""
    fc1 = Entry(
        hf=(hf + ".gate_proj.weight", hf + ".up_proj.weight"),
        megatron=megatron + ".linear_fc1.weight",
        shapes=((width, "hidden"), (width, "hidden")),
        split=Split.GATE_UP,
        linear=True,
        **more,
    )
    return fc1, linear(hf + ".down_proj", megatron + ".linear_fc2", ("hidden", width), Split.ROW, **more)


def refuse_unsupported(hf: HFConfig, family: str, required: Iterable[str], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ValueError where config.json lacks a `required` key or has an option at a value that is not in `only`
    (the first is what a config that does not say means)."""
    if missing := [key for key in required if hf.get(key) is None]:
        raise ValueError(f"config.json lacks {', '.join(missing)}: family {family} needs them")
    for key, allowed in only.items():
        value = hf.get(key, allowed[0])
        if value is not None and value not in allowed:
            raise ValueError(f"config.json: {key} = {value!r} is not trained by family {family}: want {allowed[0]!r}")
