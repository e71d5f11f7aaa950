"""Where a row of a layer's cache has the key and the value of each head."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The key of head h of `heads` is at column h * `key`. With `latent` the value is the key's first `value`
    dimensions, else values follow the keys of all heads and are as long."""

    heads: int
    key: int
    value: int
    latent: bool

    @staticmethod
    def of_heads(heads: int, size: int) -> CacheLayout:
        """The keys of all heads, then their values."""
        return CacheLayout(heads, size, size, latent=False)

    @staticmethod
    def of_latent(latent: int, rotated: int) -> CacheLayout:
        """One latent and one rotated part for all heads; the latent is the value too."""
        return CacheLayout(1, latent + rotated, latent, latent=True)

    @property
    def width(self) -> int:
        return self.key if self.latent else 2 * self.heads * self.key

    @property
    def parts(self) -> tuple[int, int]:
        """Dimensions of a key that are read in one piece each: all and none, or those of the value and the rest."""
        return (self.value, self.key - self.value) if self.latent else (self.key, 0)
