"""How many weights this process has encoded by Triton kernels, and by PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Elements of weights that `Codec.encode` was given, since the process began."""

    triton: int = 0
    torch: int = 0

    def now(self) -> Tally:
        return Tally(self.triton, self.torch)

    def share_since(self, before: Tally) -> float | None:
        """Of what was encoded since, the share that Triton encoded; None: nothing was."""
        triton, torch = self.triton - before.triton, self.torch - before.torch
        return triton / (triton + torch) if triton + torch else None


ENCODED = Tally()
