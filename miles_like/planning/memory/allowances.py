"""Memory that no tensor of this project holds: the driver's context, communication libraries, the allocator, the
engine's runtime. Each amount has a name and its source; without a published source it is marked as an assumption."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_bridge.config import TrainerConfig
from miles_like.planning.memory.parts import MIB, Part

CONTEXT = 768 * MIB
TRAINER_CONTEXT = 3072 * MIB
COMMUNICATOR = 256 * MIB
FRAGMENTATION = 0.10
_DEEPEP_SMS = 20  # Buffer.num_sms
_NVL = 8  # NUM_MAX_NVL_PEERS
_TOP_K = 128  # kNumMaxTopK and kNumMaxScales
_META = 8  # SourceMeta of internode.cu
# ranks -> tokens of a receive chunk over NVLink; Buffer.get_dispatch_config and get_combine_config
_NVL_TOKENS = {16: 288, 24: 288, 32: 288, 48: 288, 64: 288, 96: 480, 128: 560, 144: 720, 160: 720}
_NVL_TOKENS_OF_A_NODE = 256
_RDMA_TOKENS = 128
LOW_LATENCY_TOKENS = 128  # SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK's default in SGLang 0.5.23


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    part: Part
    what: str
    source: str


ALLOWANCES: tuple[Allowance, ...] = (
    Allowance(
        part="CUDA context",
        what=f"{TRAINER_CONTEXT // MIB} MiB a trainer rank, {CONTEXT // MIB} MiB an engine's: driver, loaded kernels, "
        "workspaces of cuBLAS and TransformerEngine",
        source="measured with one trainer rank on an H200 (docs/gpu.md): 0.6 GiB of an empty context, 2.4 and 2.8 GiB "
        "outside of the allocator after a step, 0.1 and 0.2 GiB of workspaces while it sleeps; the engine's is an "
        "assumption",
    ),
    Allowance(
        part="NCCL",
        what=f"{COMMUNICATOR // MIB} MiB for each group of more than one rank",
        source="assumption; 16 channels with buffers of 4 MiB (NCCL_BUFFSIZE, NCCL documentation) and smaller ones of "
        "the LL and LL128 protocols, for ring and tree",
    ),
    Allowance(
        part="DeepEP",
        what="buffers of dispatch and combine, from their size hints",
        source="DeepEP csrc/config.hpp (get_nvl_buffer_size_hint, get_rdma_buffer_size_hint, LowLatencyLayout) and "
        "deep_ep/buffer.py, used by megatron-core 0.16.1 (fused_a2a.py) and SGLang 0.5.23 (token_dispatcher/deepep.py)",
    ),
    Allowance(
        part="fragmentation",
        what=f"{FRAGMENTATION:.0%} of activations, logits and gathered chunks",
        source="assumption; the caching allocator keeps blocks that no tensor fills (PyTorch, CUDA semantics)",
    ),
    Allowance(
        part="engine runtime",
        what="512 MiB, 1.5 MiB a token of a prefill chunk and 2 MiB a running request of a rank, 1.5 GiB more for "
        "latent attention, and the routes' buffer",
        source="SGLang 0.5.23 arg_groups/memory_hook.py (handle_gpu_memory_settings, reserve_for_graph_mb); its terms "
        "of data-parallel attention are replaced by the numbers of one rank",
    ),
)


def communicators(config: TrainerConfig) -> int:
    """Groups of more than one rank that a trainer rank communicates in over NCCL: of `initialize_model_parallel`, those
    that training, the optimizer and the export use."""
    p = config.parallel
    expert_data = p.tp * p.cp * p.dp // (p.ep * p.etp)
    sizes = [p.world_size, p.tp, p.pp, p.cp, p.dp * p.cp, p.ep, p.etp, expert_data]
    if p.ep > 1 and p.etp > 1:
        sizes.append(p.ep * p.etp)
    if p.tp > 1 and p.pp > 1:
        sizes.append(p.tp * p.pp)  # over which a stage's gradient norms are summed
    return sum(size > 1 for size in sizes)


def deepep_normal(ranks: int, hidden_bytes: int) -> int:
    """Bytes of a rank's buffers for training and prefill."""
    channels, nvl, rdma = _DEEPEP_SMS // 2, min(ranks, _NVL), max(ranks // _NVL, 1)
    tokens = _NVL_TOKENS.get(ranks, max(_NVL_TOKENS.values())) if ranks > _NVL else _NVL_TOKENS_OF_A_NODE
    line = hidden_bytes + _META + _TOP_K * (8 + 4 + 4)
    near = channels * nvl * ((2 * rdma + 3) * 4 + tokens * line)
    if ranks <= _NVL:
        return near
    far = channels * rdma * ((2 * _NVL + 2) * 2 * 4 + 2 * _RDMA_TOKENS * (line + 16)) + MIB
    return near + far


def deepep_low_latency(ranks: int, hidden: int, experts: int) -> int:
    """Bytes of a rank's buffers for decode: two each for sending and receiving."""
    scales = hidden // 128
    dispatch = 16 + max(2 * hidden, hidden + 4 * scales)
    combine = 4 * scales + 2 * hidden
    each = experts * LOW_LATENCY_TOKENS * max(dispatch, combine)
    sends = LOW_LATENCY_TOKENS * max(dispatch, experts * combine)
    signals = experts * 8 + experts // ranks * 4
    return 2 * (sends + each) + 2 * (-(-signals // 128) * 128)


def trainer_allowances(config: TrainerConfig, hidden: int) -> dict[Part, int]:
    """Bytes by part of a trainer rank's process, except fragmentation; they stay allocated while it sleeps."""
    out: dict[Part, int] = {"CUDA context": TRAINER_CONTEXT, "NCCL": COMMUNICATOR * communicators(config)}
    kernels = config.kernels
    if kernels.dispatcher == "flex":
        out["DeepEP"] = deepep_normal(config.parallel.ep * config.parallel.etp, 2 * hidden)
    return {part: n for part, n in out.items() if n}
