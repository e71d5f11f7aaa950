"""The command line of a run on CPU whose stock server has a part on each of two nodes, as one on GPUs has:

python -m tests.sglang_cpu.programs.over_two_nodes train CONFIG ...
"""

from __future__ import annotations

from typing import Any

from miles_like.cluster import placement
from miles_like.cluster.placement import Slot

if __name__ == "__main__":
    from miles_like.cli import main

    planned: Any = vars(placement)["_servers"]

    def servers(role: placement.Role, *given: Any) -> list[Slot]:
        return [
            Slot(role=slot.role, index=slot.index, node=k, gpus=(), node_rank=k, nnodes=2, stock=True)
            for slot in planned(role, *given)
            for k in range(2)
        ]

    vars(placement).update(_servers=servers)
    main()
