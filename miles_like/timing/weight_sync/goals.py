"""Publications of DeepSeek-V3 (671 B) and Kimi-K2 (1 T) on 128 and 256 H100 by every path, beside published ones.

Layouts are those of configs/deepseek_v3_fp8.toml and configs/kimi_k2_int4_qat.toml, with DP for the number of ranks,
and servers of 32 GPUs of three kinds: experts whole on each rank with attention replicated (as DeepSeek-V3 ships) or
divided, and everything divided. Trainer and servers share their GPUs for "tensor", and have their own otherwise. Times
and links alone are simulated: whether a layout fits into memory `miles-like plan` answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_bridge.config import ParallelConfig
from megatron_bridge.families.base import HFConfig
from miles_like.device_table import GIB, MIB, device
from miles_like.timing.engine import EngineSetup
from miles_like.timing.of_run import element_bytes
from miles_like.timing.publish import PublishSetup
from miles_like.timing.rates.calibration import SHARED_DISK
from miles_like.timing.weight_sync.paths import SyncSetup, synchronize
from miles_like.timing.weight_sync.pipeline import Timeline
from miles_like.timing.weight_sync.stream import publication
from quant.spec import QuantFormat, QuantSpec

H100 = device("H100")
CHANGED = 0.03
"""Share of bytes that a step changes, of "delta": the middle of verl's 1 % to 3 % and more (docs/advance/
delta_weight_sync.md: 0.02 % to 0.05 % in early steps of a model with experts)."""
FP8, INT4 = QuantSpec.of(QuantFormat.FP8), QuantSpec.of(QuantFormat.INT4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model in a format on some GPUs, and the published seconds to reach."""

    model: str
    spec: QuantSpec | None
    ranks: int
    """Of the trainer."""
    gpus: int
    """Of the servers."""
    goal: float

    @property
    def name(self) -> str:
        stored = "BF16" if self.spec is None else self.spec.format.value.upper()
        return f"{self.model} {stored}, {self.ranks} + {self.gpus} H100"


NEMO_RL, PERPLEXITY = 2.4, 1.3
CASES = (
    Case(model="deepseek_v3", spec=FP8, ranks=128, gpus=128, goal=NEMO_RL),
    Case(model="deepseek_v3", spec=FP8, ranks=256, gpus=256, goal=NEMO_RL),
    Case(model="deepseek_v3", spec=None, ranks=256, gpus=256, goal=NEMO_RL),
    Case(model="kimi_k2", spec=FP8, ranks=128, gpus=128, goal=PERPLEXITY),
    Case(model="kimi_k2", spec=FP8, ranks=256, gpus=128, goal=PERPLEXITY),
    Case(model="kimi_k2", spec=FP8, ranks=256, gpus=256, goal=PERPLEXITY),
    Case(model="kimi_k2", spec=INT4, ranks=256, gpus=256, goal=PERPLEXITY),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    case: Case
    path: str
    found: Timeline

    @property
    def reached(self) -> bool:
        return self.found.seconds <= self.case.goal


def trainer(case: Case) -> ParallelConfig:
    dp = case.ranks // 64
    return ParallelConfig(tp=8, pp=8, dp=dp, ep=8 * dp, first_stage_layers=7, last_stage_layers=6)


def servers(case: Case) -> dict[str, EngineSetup]:
    """Kinds of servers, of 32 GPUs each."""
    nbytes = element_bytes(case.spec)
    scoped = case.spec is not None and bool(case.spec.ignore)
    base = EngineSetup(
        device=H100,
        servers=case.gpus // 32,
        tp=32,
        weight_bytes=2.0 if scoped else nbytes,
        expert_bytes=nbytes,
        fp8=case.spec is not None and case.spec.format is QuantFormat.FP8,
    )
    experts = replace(base, ep=32, deepep=True, replicated_dense=True)
    return {"DP attention, EP32": replace(experts, dp=32), "TP32, EP32": experts, "TP32": base}


def results(case: Case, hf: HFConfig) -> Iterator[Result]:
    """Every path to the servers that DeepSeek-V3 ships with; "reshard" to every kind."""
    kinds, layout = servers(case), trainer(case)
    slots = {kind: publication(hf, layout, engine, case.spec) for kind, engine in kinds.items()}
    shipped, *others = kinds
    for label, change, more in _PATHS:
        if change["path"] == "ipc" and case.ranks != case.gpus:
            continue  # on shared GPUs there is a server's rank for each of the trainer's
        if case.spec is None and change["path"] == "ipc" and "encoded_first" in more:
            continue  # nothing is encoded
        for kind in (shipped, *others) if label == _RESHARD else (shipped,):
            publish = PublishSetup(device=H100, ranks=case.ranks, engine=kinds[kind], **change)
            setup = SyncSetup(publish=publish, parallel=layout, spec=case.spec, **more)
            yield Result(case=case, path=label.format(kind=kind), found=synchronize(slots[kind], setup))


def variations(case: Case, hf: HFConfig) -> Iterator[Result]:
    """The last path of `results` with other links, buffers and buckets."""
    engine, layout = next(iter(servers(case).values())), trainer(case)
    slots = publication(hf, layout, engine, case.spec)
    for label, device_of, more in (
        ("as above", H100, {}),
        ("links of 200 Gb/s", replace(H100, inter=H100.inter / 2), {}),
        ("links of 800 Gb/s", replace(H100, inter=2 * H100.inter), {}),
        ("one buffer: neighbouring stages do not overlap", H100, {"buffers": 1}),
        ("eight buffers", H100, {"buffers": 8}),
        ("buckets of 256 MiB", H100, {"bucket_bytes": 256 * MIB}),
        ("buckets of 8 GiB", H100, {"bucket_bytes": 8 * GIB}),
    ):
        on = replace(engine, device=device_of)
        publish = PublishSetup(path="reshard", device=device_of, ranks=case.ranks, engine=on)
        options: dict[str, Any] = {**_PATHS[-1][2], **more}
        setup = SyncSetup(publish=publish, parallel=layout, spec=case.spec, **options)
        yield Result(case=case, path=label, found=synchronize(slots, setup))


_Options = Mapping[str, Any]
_RESHARD = "reshard to {kind}"
_PATHS: tuple[tuple[str, _Options, _Options], ...] = (
    ("tensor, gathered in BF16 and then encoded", {"path": "ipc"}, {"encoded_first": False}),
    ("tensor, encoded and then gathered", {"path": "ipc"}, {}),
    ("tensor, encoded and then gathered, once a node", {"path": "ipc"}, {"once_a_node": True}),
    ("disk, 10 GB/s for all", {"path": "disk", "disk": SHARED_DISK}, {}),
    ("distributed, rank 0 encodes", {"path": "distributed"}, {"one_sender": True, "encoded_first": False}),
    (
        "distributed, one source a stage, gathered in BF16 and then encoded, loaded in turn",
        {"path": "distributed"},
        {"encoded_first": False, "load_in_turn": True},
    ),
    ("distributed, one source a stage", {"path": "distributed"}, {}),
    ("distributed, eight sources a stage", {"path": "distributed", "sources": 8}, {}),
    ("delta, 3 % changed, eight sources", {"path": "delta", "sources": 8, "changed": CHANGED}, {}),
    (_RESHARD, {"path": "reshard"}, {"bucket_bytes": GIB}),
    ("reshard to {kind}, once a node", {"path": "reshard"}, {"bucket_bytes": GIB, "once_a_node": True}),
)
