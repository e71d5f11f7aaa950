"""Which parts of a served model's memory are released, and which requests the server rejects meanwhile.

The rules are a stock SGLang server's, which ends where this one refuses. The content of weights that were released is
undefined there; here they have none, and take up memory again with the publication that replaces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rollout.wire.bodies import MemoryTag


class Memory:
    """The released parts of one server's memory. `Service` frees and allocates."""

    def __init__(self) -> None:
        self.released: set[MemoryTag] = set()
        self.undefined = False  # the weights were released and have not been replaced

    @property
    def refusal(self) -> str:
        """The reason why prompts are rejected, as one sentence; "": they are accepted."""
        if self.released:
            return f"the {self._names(self.released)} memory of this server is released: resume it first"
        if self.undefined:
            return "the weights of this server were released and are undefined: publish all of them first"
        return ""

    def release(self, tags: Iterable[MemoryTag]) -> None:
        """Raises ValueError for a tag that is released already."""
        if again := self.released.intersection(tags):
            raise ValueError(f"the {self._names(again)} memory of this server was already released: resume it first")
        self.released.update(tags)
        self.undefined |= MemoryTag.WEIGHTS in self.released

    def resume(self, tags: Iterable[MemoryTag]) -> None:
        """Raises ValueError for a tag that is not released."""
        if held := set(tags) - self.released:
            raise ValueError(f"the {self._names(held)} memory of this server was not released, so it cannot be resumed")
        self.released.difference_update(tags)

    def require_weights(self, *, defined: bool = False) -> None:
        """Raises ValueError while the weights are released; with `defined` also until they have been replaced."""
        if MemoryTag.WEIGHTS in self.released:
            raise ValueError("the weights memory of this server is released: resume it before weights are read or sent")
        if defined and self.undefined:
            raise ValueError("the weights of this server were released and are undefined: publish all of them first")

    def require_all(self, missing: Sequence[str], total: int) -> None:
        """Raises ValueError for an update without the weights `missing` of `total`, if the old ones are undefined."""
        if self.undefined and missing:
            raise ValueError(
                f"the weights of this server were released, so an update must include all {total} of them: "
                f"{len(missing)} are missing, the first is {missing[0]}"
            )

    @staticmethod
    def _names(tags: set[MemoryTag]) -> str:
        return ", ".join(tag.value for tag in MemoryTag if tag in tags)
