"""A Megatron rank that writes what its process is and has before it is made, where a Ray worker can import it."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path

from miles_like.cluster.factories import MegatronFactory
from miles_like.rank_protocols import RankTrainer


@dataclass(frozen=True, slots=True)
class Reporting:
    """Makes the ranks of `factory`; rank N writes a `Seen` to `where`/N."""

    factory: MegatronFactory
    where: Path

    def __call__(self, rank: int, world: int, host: str, port: int) -> RankTrainer:
        from tests.support.pretended import look

        (self.where / str(rank)).write_bytes(pickle.dumps(look(dict(os.environ))))
        return self.factory(rank, world, host, port)
