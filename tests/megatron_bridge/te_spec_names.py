"""Names and shapes of one rank's model, built from the spec that argv names; prints JSON. Its own process: the stand-in
for TransformerEngine must be there before megatron is imported, and nowhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def _with_stand_in(device: Any) -> Any:
    """Everything of `init_device` but the shims that repair megatron's own handling of a missing TransformerEngine."""
    from megatron_bridge import shims

    sys.path.insert(0, str(Path(__file__).parents[1] / "fake_transformer_engine"))
    for shim in shims.TORCH_SHIMS:
        shim.install()
    import megatron.core  # noqa: F401

    for shim in shims.MEGATRON_SHIMS:
        shim.install()
    return device.DeviceEnv(device._CPU, "gloo")


def main(kind: str, hf: dict[str, Any], kernels: dict[str, Any], port: int) -> dict[str, Any]:
    from megatron_bridge import device

    env = _with_stand_in(device) if kind == "te" else device.init_device()
    from megatron_bridge.config import ParallelConfig
    from megatron_bridge.model import build_model, unwrap
    from megatron_bridge.parallel import close_parallel, init_parallel
    from megatron_bridge.resolve import resolve
    from tests.megatron_bridge import toy

    config = toy.config("", kernels=kernels, mtp_coefficient=0.1 if hf.get("num_nextn_predict_layers") else 0.0)
    context = init_parallel(
        ParallelConfig(), rank=0, world_size=1, master_addr="127.0.0.1", master_port=port, backend="gloo", seed=0
    )
    resolved = resolve(config, hf, cuda=kind == "te", te=kind == "te")
    resolved.transformer["use_cpu_initialization"] = True
    (chunk,) = build_model(config, hf, resolved, context, env)
    model = unwrap(chunk)
    sharded = model.sharded_state_dict(metadata={"singleton_local_shards": False, "dp_cp_group": context.dp_cp_group})
    out = {
        "parameters": {name: list(p.shape) for name, p in model.named_parameters()},
        "keys": {name: value.key for name, value in sharded.items()},
        "types": sorted({type(m).__name__ for m in model.modules()}),
    }
    if kernels.get("grouped_gemm"):
        out["not finite"] = _not_finite(chunk, model)
    close_parallel()
    return out


def _not_finite(chunk: Any, model: Any) -> list[str]:
    """What is said of expert 3 of the second of two expert ranks: a gradient as it comes and as summed, the weight."""
    from types import SimpleNamespace

    import torch

    from megatron_bridge.nonfinite import _Watch

    place = SimpleNamespace(ep_rank=1, pp_rank=0, dp_rank=0, rank=1, config=SimpleNamespace(ep=2, pp=1))
    name = "decoder.layers.2.mlp.experts.linear_fc1.weight3"
    weight = dict(model.named_parameters())[name]
    said = []
    for act in ("gradient", "sum", "weight"):
        step: Any = SimpleNamespace(parallel=place, chunks=[chunk], loss=None, replay=SimpleNamespace(micro=0))
        watch = _Watch(step)
        if act == "gradient":
            with watch.on():
                (weight.sum() * torch.nan).backward()
        elif act == "sum":
            weight.main_grad.zero_()[0, 0] = torch.inf
            watch.look_at_sums()
        else:
            with torch.no_grad():
                weight[0, 0] = torch.nan
        said.append(watch.bad_weight() if act == "weight" else (watch.found or ((), "nothing"))[1])
    return said


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))))
