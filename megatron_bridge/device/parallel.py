"""The layout of ranks: process groups and this rank's position in each.

The only module that calls megatron's parallel_state.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from torch.distributed import ProcessGroup, TCPStore  # type: ignore[attr-defined]

from megatron_bridge.config import ParallelConfig
from megatron_bridge.device.signals import StoreSignals
from megatron_bridge.plan.layout import check_world


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParallelContext:
    """This rank's position and groups. Groups of size one exist too; collectives over them are the identity."""

    config: ParallelConfig
    rank: int
    world_size: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    cp_rank: int
    ep_rank: int
    etp_rank: int
    tp_group: ProcessGroup
    pp_group: ProcessGroup
    cp_group: ProcessGroup
    dp_cp_group: ProcessGroup
    ep_group: ProcessGroup
    etp_group: ProcessGroup
    signals: StoreSignals  # outside of collectives, through the store at which the ranks met
    last_stage_rank: int  # global rank of the last stage of this rank's pipeline, which computes the loss

    @property
    def counts_stats(self) -> bool:
        """Whether this rank's loss statistics are counted: tensor- and context-parallel ranks hold the same ones."""
        return self.is_last_stage and self.tp_rank == 0 and self.cp_rank == 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.config.pp - 1


def rank_store(host: str, port: int, *, rank: int, world_size: int, timeout: timedelta) -> TCPStore:
    """The store used for rendezvous; rank 0 serves it on `host` only.

    Given a host and port, torch's TCPStore listens on every interface of the machine; here rank 0 binds the socket
    itself. `host` is rank 0's address in the cluster, loopback on a single machine. The store has no authentication in
    any version of torch: every process that reaches that address can write to it.
    """
    listener: int | None = None
    if rank == 0:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(address)
            s.listen(world_size + 128)
            listener = s.detach()
    return TCPStore(host, port, world_size=world_size, is_master=rank == 0, timeout=timeout, master_listen_fd=listener)


def init_parallel(
    config: ParallelConfig,
    *,
    rank: int,
    world_size: int,
    master_addr: str,
    master_port: int,
    backend: str,
    seed: int,
    timeout_s: float = 600.0,
) -> ParallelContext:
    """Join the default process group and build all others. Collective over all ranks; one layout per process.

    timeout_s: time limit of every collective, in each of the groups.

    Raises ValueError when world_size is not what the layout needs.
    """
    check_world(config, world_size)
    timeout = timedelta(seconds=timeout_s)
    store = rank_store(master_addr, master_port, rank=rank, world_size=world_size, timeout=timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    mpu.initialize_model_parallel(
        config.tp,
        config.pp,
        config.vpp if config.vpp > 1 else None,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=config.etp,
        # megatron-core 0.16.1 documents whole minutes and passes the value to timedelta(minutes=...)
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=True,  # the optimizer's checkpoint gathers over them on any device
    )
    # which it does not pass to the gloo groups of expert data parallelism
    dist.distributed_c10d._set_pg_timeout(timeout, mpu._EXPERT_DATA_PARALLEL_GROUP_GLOO)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return ParallelContext(
        config=config,
        rank=rank,
        world_size=world_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        pp_rank=mpu.get_pipeline_model_parallel_rank(),
        dp_rank=mpu.get_data_parallel_rank(),
        cp_rank=mpu.get_context_parallel_rank(),
        ep_rank=mpu.get_expert_model_parallel_rank(),
        etp_rank=mpu.get_expert_tensor_parallel_rank(),
        tp_group=mpu.get_tensor_model_parallel_group(),
        pp_group=mpu.get_pipeline_model_parallel_group(),
        cp_group=mpu.get_context_parallel_group(),
        dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
        ep_group=mpu.get_expert_model_parallel_group(),
        etp_group=mpu.get_expert_tensor_parallel_group(),
        signals=StoreSignals(store, world_size),
        last_stage_rank=mpu.get_pipeline_model_parallel_last_rank(),
    )


def free_gathered() -> None:
    """Free the buffer in which tensor-parallel linears gather their inputs; the next pass allocates it again."""
    mpu.get_global_memory_buffer().buffer.clear()


def close_parallel() -> None:
    """Destroy all process groups. Idempotent."""
    if dist.is_initialized():
        mpu.destroy_model_parallel()
        # megatron-core 0.16.1 does not reset these two, which would keep their communication threads alive
        mpu._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
        mpu._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
        for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
            embedding.forward.cache_clear()  # megatron caches by module, which holds the context-parallel group
        dist.destroy_process_group()
