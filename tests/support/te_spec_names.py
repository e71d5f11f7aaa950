"""Names and shapes of one rank's models of either spec, and the facts of the installed release of TransformerEngine, in
a rank's own process (`spawn.run_ranks`)."""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]


def te_names(rank: int, world: int, port: int, jobs: list[tuple[Config, dict[str, Any]]]) -> dict[str, Any]:
    """jobs: models and their kernels. In a process of `te.process.init_te`."""
    from tests.support.te import facts, process

    env = process.init_te()
    return {"built": [_built("te", env, hf, kernels) for hf, kernels in jobs], "facts": facts.facts()}


def local_names(rank: int, world: int, port: int, models: list[Config]) -> list[dict[str, Any]]:
    from megatron_bridge.device.device import init_device

    return [_built("local", init_device(), hf, {}) for hf in models]


def _built(kind: str, env: Any, hf: dict[str, Any], kernels: dict[str, Any]) -> dict[str, Any]:
    from megatron_bridge.config import ParallelConfig
    from megatron_bridge.device.parallel import close_parallel, init_parallel
    from megatron_bridge.model.build import build_model, unwrap
    from megatron_bridge.plan.resolve import resolve
    from tests.support import toy
    from tests.support.spawn import free_port

    config = toy.config("", kernels=kernels, mtp_coefficient=0.1 if hf.get("num_nextn_predict_layers") else 0.0)
    context = init_parallel(
        ParallelConfig(), rank=0, world_size=1, master_addr="127.0.0.1", master_port=free_port(), backend="gloo", seed=0
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
    out["rounded"] = _rounded(chunk, model, hf, context)
    close_parallel()
    return out


def _rounded(chunk: Any, model: Any, hf: dict[str, Any], context: Any) -> dict[str, list[str]]:
    """Local name -> hashes of the weight that quantization-aware training computes with, and of what it is published
    from; every weight is random by its local name. A linear's product is held to them here."""
    import hashlib

    import torch

    from megatron_bridge.config import PrecisionConfig
    from megatron_bridge.families.registry import family_of
    from megatron_bridge.optim.te_names import local_name
    from megatron_bridge.step.fake_quant import FakeQuant

    tensors = family_of(hf).bind(hf, mtp=bool(model.config.mtp_num_layers))
    precision = PrecisionConfig(format="fp8", block=(16, 16), qat=True)
    spec = precision.spec()
    assert spec is not None
    fake = FakeQuant([chunk], context, tensors, spec, precision, torch.device("cpu"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            seed = int(hashlib.sha256(local_name(name).encode()).hexdigest()[:12], 16)
            p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.02)
    fake.weights_changed()
    fake.refresh()
    out = {
        local_name(name): [
            hashlib.sha256(w().float().numpy().tobytes()).hexdigest()[:16] for w in (p.computed, p.served)
        ]
        for name, p in model.named_parameters()
        if hasattr(p, "computed")
    }
    for module in model.modules():
        if hasattr(module, "num_gemms") and hasattr(module, "weight_functions"):
            weights = [p.computed() for p in module.parameters()]
            x = torch.randn(3 * len(weights), weights[0].shape[1], dtype=weights[0].dtype)
            y = module.forward(x, [3] * len(weights))[0]
            want = torch.cat([a @ w.t() for a, w in zip(x.split(3), weights, strict=True)])
            assert torch.equal(y, want)
            y.float().sum().backward()  # straight through, to every expert
            assert all(p.main_grad.abs().sum() > 0 for p in module.parameters())
    return out


def _not_finite(chunk: Any, model: Any) -> list[str]:
    """The places reported for expert 3 of the second of two expert ranks: a gradient, its sum, the weight."""
    from types import SimpleNamespace

    import torch

    from megatron_bridge.step.nonfinite import _Watch

    place = SimpleNamespace(ep_rank=1, pp_rank=0, dp_rank=0, rank=1, config=SimpleNamespace(ep=2, pp=1))
    name = "decoder.layers.2.mlp.experts.linear_fc1.weight3"
    weight = dict(model.named_parameters())[name]
    reported = []
    for act in ("gradient", "sum", "weight"):
        step: Any = SimpleNamespace(parallel=place, chunks=[chunk], loss=None, replay=SimpleNamespace(micro=0))
        watch = _Watch(step)
        if act == "gradient":
            with watch.on():
                (weight.sum() * torch.nan).backward()
        elif act == "sum":
            weight.main_grad.zero_()[0, 0] = torch.inf
            watch.check_sums()
        else:
            with torch.no_grad():
                weight[0, 0] = torch.nan
        reported.append(watch.bad_weight() if act == "weight" else (watch.found or ((), "nothing"))[1])
    return reported
