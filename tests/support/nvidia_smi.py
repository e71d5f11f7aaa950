"""Stands in for nvidia-smi on a machine without GPUs: it reports those of `gpus.json` beside it, in the order of their
indices, as the real one does whatever CUDA_VISIBLE_DEVICES is.

    nvidia-smi -L
    nvidia-smi --query-gpu=index,uuid,... --format=csv,noheader,nounits
    nvidia-smi --query-compute-apps=... --format=csv,noheader,nounits

Fields that `gpus.json` lacks are "[N/A]". No process uses a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path


def answer(arguments: Sequence[str], gpus: Sequence[dict[str, str]]) -> str:
    """What nvidia-smi prints. Raises ValueError for arguments that it has not."""
    if list(arguments) == ["-L"]:
        return "".join(f"GPU {g['index']}: {g['name']} (UUID: {g['uuid']})\n" for g in gpus)
    query, form = (argument.partition("=") for argument in arguments)
    if form[0] != "--format" or not {"csv", "noheader"} <= set(form[2].split(",")):
        raise ValueError(f"this nvidia-smi has no {arguments}")
    if query[0] == "--query-compute-apps":
        return ""
    if query[0] != "--query-gpu":
        raise ValueError(f"this nvidia-smi has no {arguments}")
    return "".join(", ".join(g.get(field, "[N/A]") for field in query[2].split(",")) + "\n" for g in gpus)


if __name__ == "__main__":
    sys.stdout.write(answer(sys.argv[1:], json.loads(Path(__file__).with_name("gpus.json").read_text())))
