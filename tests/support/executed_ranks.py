"""Small layouts whose ranks are executed twice: as real CPU ranks, whose tensors are measured, and on fake tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_bridge.fake.live_bytes import LiveBytes
from megatron_bridge.fake.substitutes.facts import Pack, RankCounts, RankRun
from tests.support import toy
from tests.support.layouts import EXPERTS, ROUTED, agree_on_port
from tests.support.qat_cases import FORMATS
from tests.support.tiny_models import tiny, tiny_dense, tiny_glm, tiny_qwen

PACK = Pack(lengths=(100, 100, 56))
_TWO = {"num_hidden_layers": 2}  # a layer of each kind: the time of a fake rank goes by the number of operators
MODELS: dict[str, dict[str, Any]] = {
    "mla": tiny(**_TWO, **ROUTED),
    "gqa": tiny_qwen(**_TWO, num_experts=EXPERTS, mlp_only_layers=[0]),
    "four layers": tiny_qwen(num_hidden_layers=4, num_experts=EXPERTS),
    "dense": tiny_dense(**_TWO),
    "mtp": tiny_glm(**_TWO, n_routed_experts=EXPERTS, num_nextn_predict_layers=1),
}
Plant = Callable[[Any], None]  # an error that is planted in a trainer


@dataclass(frozen=True)
class Case:
    """colocated: the rank sleeps before it publishes. rank: the one that is compared. imbalance: rows of its experts,
    in units of the average."""

    model: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    colocated: bool = False
    micro_batches: int = 2
    rank: int = 1
    imbalance: float = 1.0

    def run(self, where: Path, *, rank: int | None = None, device: str = "cpu") -> RankRun:
        rank = self.rank if rank is None else rank
        hf = toy.hf_dir(where / f"{self.model}-{rank}", MODELS[self.model])
        return RankRun(
            config=toy.config(hf, **{"dtype": "bfloat16", **self.settings}),
            rank=rank,
            pack=PACK,
            micro_batches=self.micro_batches,
            device="cuda" if device == "cuda" else "cpu",
            colocated=self.colocated,
            imbalance=self.imbalance,
        )


OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
CASES: dict[str, Case] = {
    "EP2": Case("gqa", {"dp": 2, "ep": 2}),
    "TP2, QAT, recomputed": Case(
        "mla", {"tp": 2, "recompute": "full", "precision": {"qat": True, **FORMATS["fp8"]}}, colocated=True
    ),
    "PP2xVPP2, overlap": Case("four layers", {"pp": 2, "vpp": 2, "kernels": OVERLAP}),
    "CP2, recomputed in parts": Case("mla", {"cp": 2, "recompute": "selective"}),
    "ETP2, MTP": Case("mtp", {"tp": 2, "etp": 2, "mtp_coefficient": 0.1}),
    "DP2 of a dense model, fp32, with a reference": Case(
        "dense", {"dp": 2, "dtype": "float32", "reference": True}, colocated=True
    ),
}

ADAPTERS = {"lora": {"rank": 4, "alpha": 6.0, "targets": ["attention", "experts", "shared_experts", "mlp"]}}
ROLES: dict[str, Case] = {  # ranks that are not a trainer's of all weights
    "critic, EP2": Case("gqa", {"dp": 2, "ep": 2, "head": "scalar", "mode": "off"}),
    "critic's last stage": Case("four layers", {"pp": 2, "head": "scalar", "mode": "off"}),
    "reference, TP2": Case("mla", {"tp": 2, "trains": False, "mode": "off"}),
    "reference's last stage": Case("four layers", {"pp": 2, "trains": False, "mode": "off"}),
    "LoRA, DP2": Case("gqa", {"dp": 2, **ADAPTERS}, colocated=True),
    "LoRA, TP2": Case("mla", {"tp": 2, "recompute": "full", **ADAPTERS}),
    "the busiest of EP2": Case("gqa", {"dp": 2, "ep": 2}, imbalance=1.5),
    "MTP, PP2": Case("mtp", {"pp": 2, "mtp_coefficient": 0.1}),
}


def fake_ranks(rank: int, world: int, port: int, where: str, names: list[str], device: str) -> dict[str, RankCounts]:
    """Every `world`-th of the cases, or of the roles, on fake tensors."""
    from megatron_bridge.fake.execute_rank import execute

    return {name: execute((CASES | ROLES)[name].run(Path(where), device=device)) for name in names[rank::world]}


def real_ranks(
    rank: int, world: int, port: int, where: str, names: list[str], plants: Mapping[str, Plant]
) -> dict[str, RankCounts]:
    """The cases with real tensors; `plants`: an error for some of them."""
    out = {}
    for i, name in enumerate(names):
        port = agree_on_port(Path(where) / f"port-{i}-{'-'.join(plants)}", rank)
        out[name] = _measured(CASES[name].run(Path(where), rank=rank), port, plants.get(name))
    return out


def _measured(run: RankRun, port: int, plant: Plant | None) -> RankCounts:
    from megatron_bridge.fake.attribution import attribution_substitutes
    from megatron_bridge.fake.phases import batches_of, built, trained
    from megatron_bridge.fake.substitutes.process_groups import forget_last_rank
    from megatron_bridge.fake.substitutes.substitute import substituted
    from miles_like.hf.checkpoint import read_config

    batches = batches_of(run, read_config(Path(run.config.hf_config)))
    live, counts = LiveBytes(), RankCounts()
    loss_tokens = sum(int(batch.loss_mask.sum()) for batch in batches) * run.config.parallel.dp
    forget_last_rank()
    gc.collect()
    with substituted(attribution_substitutes(live)), live:
        trainer = built(run, live, counts, address=("127.0.0.1", port))
        try:
            if plant is not None:
                plant(trainer)
            trained(run, trainer, batches, loss_tokens, live, counts)
            batches.clear()
            counts.static |= {"seen from outside": _tensors_of(trainer)}
            _published(run, trainer, live, counts)
        finally:
            trainer.close()
    return counts


def _published(run: RankRun, trainer: Any, live: LiveBytes, counts: RankCounts) -> None:
    """The smallest peak of three publications: a thread of gloo that is late to let go of a bucket it has gathered adds
    one to a peak."""
    from megatron_bridge.fake.phases import slept_and_published

    smallest: dict[str, int] | None = None
    for _ in range(3):
        slept_and_published(run, trainer, lambda: [trainer.export()], live, counts)
        found = counts.peaks["publishing"]
        smallest = found if smallest is None or sum(found.values()) < sum(smallest.values()) else smallest
    counts.peaks["publishing"] = smallest or {}


def _tensors_of(trainer: Any) -> int:
    """Bytes of the storages of parameters, gradients and optimizer, found without the trainer's code for sleeping: all
    tensors that the garbage collector knows of at least a page."""
    sizes = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(size for size in sizes.values() if size >= 4096)
