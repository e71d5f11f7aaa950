"""A run's numbers, to which the nodes are held."""

from __future__ import annotations

import sys

from miles_like.cluster.environment import plain_values
from miles_like.config.run import RunConfig
from miles_like.doctor.findings import Needs


def run_needs(config: RunConfig) -> Needs:
    """Torch-free."""
    c, servers = config.cluster, config.servers
    te = ("transformer-engine", "transformer-engine-torch") if config.kernels.spec == "te" else ()
    flex = ("deep-ep",) if config.kernels.dispatcher == "flex" else ()
    ports: dict[str, int] = {}
    engine_packages: tuple[str, ...] = ()
    if servers is not None and servers.port is not None:
        ports = {f"rollout server {i}": servers.port + i for i in range(servers.servers)}
    if servers is not None and servers.engine == "sglang":
        deep_ep = ("deep-ep",) if servers.sglang.moe_a2a_backend == "deepep" else ()
        engine_packages = ("torch", "sglang", *deep_ep)
    return Needs(
        nodes=c.nodes,
        gpus_per_node=c.gpus_per_node,
        ports=ports,
        shared=() if config.cache_dir is None else (config.cache_dir,),
        local=() if c.stage_dir is None else (c.stage_dir,),
        packages=("torch", "megatron-core", "ray", *te, *flex),
        engine=sys.executable if servers is None else servers.sglang.python or sys.executable,
        engine_packages=engine_packages,
        environment=plain_values(c.env),
        interfaces="GLOO_SOCKET_IFNAME" not in c.env,  # as process_environment sets it
    )
