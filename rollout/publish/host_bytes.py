"""The bound on the host memory of a publication in buckets."""

from __future__ import annotations


class HostBytes:
    """Bytes of tensors whose buckets are packed and not loaded by the servers yet.

    Buckets of `hold_bytes` may be held before the servers are paused, the last of which may exceed it; meanwhile one is
    sent and one is packed. A bucket has `bucket_bytes`, or as much as the largest. More is an error of this program and
    an AssertionError, because a process on a host without memory ends without a message.
    """

    def __init__(self, hold_bytes: int, bucket_bytes: int) -> None:
        self._hold_bytes, self._largest = hold_bytes, bucket_bytes
        self.held = self.peak = 0

    @property
    def bound(self) -> int:
        return self._hold_bytes + 3 * self._largest

    def take(self, bucket: int) -> None:
        """bucket: bytes of its tensors."""
        self._largest = max(self._largest, bucket)
        self.held += bucket
        self.peak = max(self.peak, self.held)
        assert self.held <= self.bound, f"a publication holds {self.held} bytes on the host, more than {self.bound}"

    def give(self, bucket: int) -> None:
        """The servers have loaded it."""
        self.held -= bucket
