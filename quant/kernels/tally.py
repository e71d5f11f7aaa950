"""How much this process has computed by Triton kernels, and by PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """What was counted since the process began."""

    triton: int = 0
    torch: int = 0

    def now(self) -> Tally:
        return Tally(self.triton, self.torch)

    def share_since(self, before: Tally) -> float | None:
        """Of what was counted since, the share of Triton; None: nothing was."""
        triton, torch = self.triton - before.triton, self.torch - before.torch
        return triton / (triton + torch) if triton + torch else None


ENCODED = Tally()  # elements of weights that `Codec.encode` was given
