"""A forward hook for stock SGLang (`--forward-hooks`), which writes the residual stream at a norm into a directory.

SGLang's Python imports it from this folder, in which nothing else is importable, so that it needs torch and safetensors
only. While DIRECTORY/on does not exist it does nothing. Files are COUNT.RANK.NAME.safetensors, COUNT from 0 for each
norm and process; each has `state`, fp32 [tokens of the pass, hidden size].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file


def hook(config: Mapping[str, str]) -> Callable[[torch.nn.Module, tuple[torch.Tensor, ...], object], None]:
    """config: `directory`, and the `name` of the state."""
    directory, name = Path(config["directory"]), config["name"]
    count = itertools.count()

    def write(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: object) -> None:
        if not (directory / "on").exists():
            return
        # with a residual a norm returns (its result, the residual after the addition); the first norm has none
        stream = output[1] if isinstance(output, tuple) else inputs[0]
        rank = dist.get_rank() if dist.is_initialized() else 0
        path = directory / f"{next(count):06}.{rank}.{name}.safetensors"
        part = path.with_suffix(".part")
        save_file({"state": stream.detach().float().cpu().contiguous()}, part)
        part.rename(path)

    return write
