"""What the engine cannot do on a CUDA device, and the settings of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from rollout.embedded.families.architecture import Architecture

_ROW_BYTES = 16  # at whose multiples the rows of a grouped product begin


def check_flags(*, dtype: str, tp_size: int, ep_size: int, activations: str, exact: Sequence[int] | None) -> None:
    """Raises ValueError, with the remedy, for flags of a server that its `--device cuda` does not support."""
    if exact is not None:
        refused = "--exact-parts: no device computes the bits of the exact operations; remove it"
    elif tp_size > 1 or ep_size > 1:
        refused = f"--tp-size {tp_size} --ep-size {ep_size}: one process computes on one device; set both to 1"
    elif dtype != "bfloat16":
        refused = f"--dtype {dtype}: grouped products of a device are of bfloat16; choose that"
    elif activations != "none":
        refused = f"--activations {activations}: inputs are only rounded on CPU; choose none"
    else:
        return
    raise ValueError(f"--device cuda with {refused}, or choose --device cpu")


def check_sizes(arch: Architecture) -> None:
    """Raises ValueError for experts whose rows grouped products of bfloat16 do not accept."""
    moe, of_row = arch.moe if arch.moe_layers else None, _ROW_BYTES // torch.bfloat16.itemsize
    for what, n in () if moe is None else (("hidden_size", arch.hidden), ("moe_intermediate_size", moe.ffn)):
        if n % of_row:
            raise ValueError(
                f"--device cuda: {what} = {n} is not a multiple of {of_row}, at which rows of experts' products begin: "
                "choose --device cpu"
            )


@contextmanager
def memory_is_enough(tokens: int) -> Iterator[None]:
    """Raises ValueError where the block, in which weights are loaded and a cache of `tokens` is made, has too little of
    a device's memory."""
    try:
        yield
    except torch.OutOfMemoryError as e:
        raise ValueError(
            f"--device cuda: weights and a cache of {tokens} tokens do not fit beside what others have there "
            f"({str(e).partition('. ')[0]}): lower --max-total-tokens, or choose --device cpu"
        ) from None


def use_cuda() -> None:
    """Sets this process up for its first visible device. Raises ValueError where there is none."""
    if not torch.cuda.is_available():
        raise ValueError(
            f"--device cuda: PyTorch {torch.__version__} sees no CUDA device: choose --device cpu, or start the server "
            "where there is one, with a PyTorch for it"
        )
    # sums of products in fp32 to the end, as on CPU: partial sums would be rounded to bfloat16
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
