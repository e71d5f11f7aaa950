"""Flags of slime 0.3.1 (commit 624b824, slime/utils/arguments.py) and of Miles 0.1.0 (commit 31f1ca9,
miles/utils/arguments.py), which has slime's and more; both add Megatron's, and SGLang's with the prefix `sglang-`."""

from __future__ import annotations

import math
from typing import Any

from miles_like.config.foreign.translation import (
    Rule,
    Translation,
    one_of,
    path,
    positive,
)

ADVANTAGES = {
    "grpo": "grpo",
    "gspo": "grpo",
    "cispo": "grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "ppo": "ppo",
}
LOSSES = {"gspo": "gspo", "cispo": "cispo"}
ESTIMATORS = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
REWARDS = {
    "deepscaler": "math_verify",
    "dapo": "math_verify",
    "math": "math_verify",
    "gpqa": "multiple_choice",
    "remote_rm": "remote",
}
NONZERO_STD = "check_reward_nonzero_std"
RULES: dict[str, Rule] = {
    "hf-checkpoint": Rule("model.path", path),
    "prompt-data": Rule("data.train", path),
    "input-key": Rule("data.prompt_key", default="input"),
    "label-key": Rule("data.answer_key"),
    "rollout-max-prompt-len": Rule("data.max_prompt_tokens"),
    "seed": Rule("seed", default=1234),
    "num-rollout": Rule("train.steps"),
    "rollout-batch-size": Rule("train.groups_per_step"),
    "n-samples-per-prompt": Rule("train.samples_per_group", default=1),
    "max-tokens-per-gpu": Rule("train.max_tokens_per_rank"),
    "recompute-granularity": Rule("train.recompute"),
    "recompute-modules": Rule("train.recompute_modules", lambda value: value if isinstance(value, list) else [value]),
    "moe-router-bias-update-rate": Rule("train.router_bias_update_rate", positive),
    "moe-aux-loss-coeff": Rule("train.router_aux_loss", positive),
    "rollout-max-response-len": Rule("rollout.max_new_tokens"),
    "rollout-health-check-interval": Rule("rollout.health_every_s"),
    "rollout-health-check-timeout": Rule("rollout.health_timeout_s"),
    "rollout-temperature": Rule("rollout.temperature"),
    "rollout-top-p": Rule("rollout.top_p"),
    "rollout-top-k": Rule("rollout.top_k"),
    "lr": Rule("optimizer.lr"),
    "min-lr": Rule("optimizer.min_lr", positive),
    "lr-warmup-iters": Rule("optimizer.warmup_steps", positive),
    "lr-decay-iters": Rule("optimizer.decay_steps"),
    "lr-wsd-decay-iters": Rule("optimizer.wsd_decay_steps"),
    "lr-decay-style": Rule("optimizer.schedule", one_of(SCHEDULES), default="linear"),
    "weight-decay": Rule("optimizer.weight_decay", default=0.01),
    "adam-beta1": Rule("optimizer.beta1"),
    "adam-beta2": Rule("optimizer.beta2", default=0.999),
    "adam-eps": Rule("optimizer.eps"),
    "clip-grad": Rule("optimizer.clip_grad"),
    "optimizer-cpu-offload": Rule("kernels.offload_optimizer", lambda on: 1.0 if on else None),
    "optimizer-offload-fraction": Rule("kernels.offload_optimizer", float),
    "tensor-model-parallel-size": Rule("parallel.tp"),
    "pipeline-model-parallel-size": Rule("parallel.pp"),
    "num-virtual-stages-per-pipeline-rank": Rule("parallel.vpp"),
    "context-parallel-size": Rule("parallel.cp"),
    "expert-model-parallel-size": Rule("parallel.ep"),
    "expert-tensor-parallel-size": Rule("parallel.etp"),
    "decoder-first-pipeline-num-layers": Rule("parallel.first_stage_layers"),
    "decoder-last-pipeline-num-layers": Rule("parallel.last_stage_layers"),
    "sequence-parallel": Rule("parallel.sequence_parallel", default=False),
    "moe-grouped-gemm": Rule("kernels.grouped_gemm"),
    "moe-permute-fusion": Rule("kernels.permute_fusion"),
    "moe-token-dispatcher-type": Rule("kernels.dispatcher"),
    "moe-flex-dispatcher-backend": Rule("kernels.flex_backend"),
    "moe-shared-expert-overlap": Rule("kernels.overlap_shared_expert"),
    "overlap-grad-reduce": Rule("kernels.overlap_grad_reduce"),
    "overlap-param-gather": Rule("kernels.overlap_param_gather"),
    "advantage-estimator": Rule("algorithm.advantage", one_of(ADVANTAGES), default="grpo"),
    "eps-clip-c": Rule("algorithm.clip_dual"),
    "entropy-coef": Rule("algorithm.entropy_coefficient", positive),
    "disable-grpo-std-normalization": Rule("algorithm.normalize_std", lambda on: not on),
    "use-unbiased-kl": Rule("algorithm.kl_unbiased"),
    "ref-update-interval": Rule("algorithm.reference_every"),
    "calculate-per-token-loss": Rule(
        "algorithm.aggregation", lambda on: "token_mean" if on else "sequence_mean", default=False
    ),
    "lora-rank": Rule("lora.rank", positive),
    "max-weight-staleness": Rule("buffer.max_staleness"),
    "n-samples-per-eval-prompt": Rule("eval.samples"),
    "eval-interval": Rule("eval.every", default=0),
    "eval-temperature": Rule("eval.temperature"),
    "save-interval": Rule("checkpoint.every"),
    "save-retain-interval": Rule("checkpoint.keep_every"),
    "async-save": Rule("checkpoint.asynchronous"),
    **{
        f"sglang-{name.replace('_', '-')}": Rule(f"rollout.sglang.{name}")
        for name in (
            *("mem_fraction_static", "context_length", "max_running_requests", "chunked_prefill_size"),
            *("attention_backend", "kv_cache_dtype", "dp_size", "ep_size", "enable_dp_attention", "moe_a2a_backend"),
            *("deepep_mode", "moe_dense_tp_size"),
        )
    },
}
ARCHITECTURE = "read from the checkpoint's config.json"
REASONS = {
    **dict.fromkeys(
        (
            *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "group-query-attention"),
            *("num-query-groups", "kv-channels", "normalization", "position-embedding-type", "norm-epsilon"),
            *("rotary-", "swiglu", "untie-embeddings", "vocab-size", "disable-bias-linear", "qk-layernorm"),
            *("num-experts", "moe-ffn", "moe-router-score", "moe-router-topk", "moe-layer-freq", "moe-shared-expert-i"),
            *("multi-latent-attention", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb", "v-head-dim"),
            *("moe-router-num-groups", "moe-router-group", "moe-router-pre-softmax", "moe-router-enable-expert-bias"),
            *("moe-router-load-balancing-type", "moe-router-topk-scaling-factor", "mtp-num-layers", "make-vocab"),
            *("attention-dropout", "hidden-dropout", "add-qkv-bias"),
        ),
        ARCHITECTURE,
    ),
    "load": "--resume continues the run of --run-dir",
    "save": "pass --run-dir; miles-like export writes a Hugging Face directory from it",
    "ref-load": "the initial weights are the reference",
    "rollout-shuffle": "prompts are always shuffled, by `seed`",
    "rollout-seed": "`seed` sets prompts, sampling and weights",
    "balance-data": "micro-batches are always balanced over data-parallel ranks",
    "balance-by-flops": "train.balance = 'flops'",
    "use-dynamic-batch-size": "micro-batches are always packed to train.max_tokens_per_rank",
    "micro-batch-size": "micro-batches are packed to train.max_tokens_per_rank, not counted in samples",
    "log-probs-max-tokens-per-gpu": "log-probabilities are packed as training is",
    "recompute-": "train.recompute = 'full' recomputes each layer",
    "optimizer": "the optimizer is AdamW; kernels.offload_optimizer moves a share of it to the host",
    "overlap-cpu-optimizer": "set by kernels.offload_optimizer",
    "use-precision-aware-optimizer": "set by kernels.offload_optimizer",
    "accumulate-allreduce-grads-in-fp32": "gradients are always reduced in fp32",
    "attention-softmax-in-fp32": "set by the trainer",
    "attention-backend": "set by kernels.spec",
    "moe-router-dtype": "routers compute in fp32",
    "moe-token-drop-policy": "no token is dropped",
    "moe-enable-deepep": "kernels.dispatcher = 'flex' with kernels.flex_backend = 'deepep'",
    "use-wandb": "trackers are not configured in the run's file",
    "wandb-": "trackers are not configured in the run's file",
    "tb-": "TensorBoard's files are always written",
    "partial-rollout": "unfinished samples continue under new weights with buffer.max_staleness above 0",
    "mask-offpolicy-in-partial-rollout": "buffer.old_tokens = 'mask'",
    "custom-generate-function-path": "the signature differs: see docs/extending.md for rollout.generate",
    "rollout-function-path": "the loop is this project's; rollout.generate makes the samples of a prompt",
    "custom-loss-function-path": "the signature differs: see docs/extending.md for algorithm.loss",
    "custom-advantage-function-path": "the signature differs: see docs/extending.md for algorithm.advantage",
    "use-opd": "name a teacher in [distillation.teachers.NAME] and set distillation.mode",
    "opd-": "name a teacher in [distillation.teachers.NAME] and set distillation.mode",
    "eval-": "evaluation samples as training does, except for the keys of [eval]",
    "sglang-": "no key sets this SGLang flag",
    "use-fault-tolerance": "servers of a run are always watched and restarted (rollout.restarts)",
    "update-weight-": "publish.path and publish.bucket_bytes",
    "offload": "with cluster.colocate trainer and servers release their memory to each other",
    "target-modules": "choose lora.targets: attention, experts, shared_experts, mlp",
    "train-backend": "the trainer is always Megatron's",
}


def translate(t: Translation) -> None:
    """Fill `t` from the flags."""
    t.apply(RULES)
    t.put("rollout-num-gpus-per-engine", "rollout.engine", "sglang", "the engine of both projects")
    t.put("apply-chat-template", "data.template", "chat" if t.get("apply-chat-template", False) else "plain")
    _steps(t)
    _clip(t)
    _kl(t)
    _weights(t)
    _gpus(t)
    _evaluation(t)
    _reward(t)
    if "sglang-mem-fraction-static" not in t.given:
        t.to_do.append("rollout.sglang.mem_fraction_static: SGLang chooses it by the GPU; here it is 0.8")
    if "lora.rank" in t.ours:
        t.apply({"lora-alpha": Rule("lora.alpha")})
    t.finish(REASONS)


def _steps(t: Translation) -> None:
    """Samples of an optimizer step, or the number of such steps in a rollout; prompts beyond those of a step."""
    groups, samples = t.ours.get("train.groups_per_step"), t.ours["train.samples_per_group"]
    given, batch = t.get("num-steps-per-rollout"), t.get("global-batch-size")
    if given is not None:
        t.put(["num-steps-per-rollout", "global-batch-size"], "train.steps_per_rollout", given)
    elif batch is not None and groups is not None:
        steps, rest = divmod(groups * samples, batch)
        if rest or not steps or groups % steps:
            t.leave(
                "global-batch-size", f"{batch} samples do not divide {groups} x {samples} samples into whole groups"
            )
            t.to_do.append("train.steps_per_rollout")
        else:
            t.put(["global-batch-size"], "train.steps_per_rollout", steps, f"{groups} x {samples} samples / {batch}")
    more = t.get("over-sampling-batch-size")
    if more is not None and groups:
        t.put("over-sampling-batch-size", "buffer.over_sampling", max(0.0, more / groups - 1), f"{more} / {groups} - 1")
    kept = t.get("dynamic-sampling-filter-path")
    if kept is not None and str(kept).endswith((NONZERO_STD, f"{NONZERO_STD}_with_fallback")):
        t.put("dynamic-sampling-filter-path", "algorithm.filter", "nonzero_std")
    elif kept is not None:
        t.leave("dynamic-sampling-filter-path", "the signature differs: see docs/extending.md for algorithm.filter")


def _clip(t: Translation) -> None:
    """The upper bound is the lower one where it is not given. An estimator may name a loss."""
    estimator = t.get("advantage-estimator", "grpo")
    if estimator in LOSSES:
        t.put("advantage-estimator", "algorithm.loss", LOSSES[estimator])
    low = t.get("eps-clip", 0.2)
    t.put("eps-clip", "algorithm.clip_low", low)
    t.put(["eps-clip-high", "eps-clip"], "algorithm.clip_high", t.get("eps-clip-high", low))
    if t.ours.get("algorithm.advantage") == "ppo":
        t.apply(
            {
                "lambd": Rule("algorithm.gae_lambda"),
                "value-clip": Rule("algorithm.value_clip"),
                "critic-lr": Rule("critic.lr"),
            }
        )
    if t.ours.get("algorithm.advantage") in ("ppo", "reinforce_pp"):
        t.apply({"gamma": Rule("algorithm.gamma")})
    if t.get("use-opsm", False):
        t.apply({"opsm-delta": Rule("algorithm.off_policy_delta", default=1e-4)})
        t.leave("use-opsm", "enabled by setting algorithm.off_policy_delta")


def _kl(t: Translation) -> None:
    in_loss, in_reward = t.get("use-kl-loss", False) and t.get("kl-loss-coef", 0.0), t.get("kl-coef", 0.0)
    if in_loss or in_reward:
        names = ["use-kl-loss", "kl-loss-coef"] if in_loss else ["kl-coef"]
        t.put(names, "algorithm.kl_coefficient", in_loss or in_reward)
        t.put(names, "algorithm.kl_in", "loss" if in_loss else "reward")
        t.apply({"kl-loss-type": Rule("algorithm.kl_estimator", one_of(ESTIMATORS), default="k1")})
    else:
        for name in ("use-kl-loss", "kl-loss-coef", "kl-loss-type", "kl-coef"):
            t.leave(name, "a coefficient of 0: no penalty")
        for ours in ("algorithm.kl_unbiased", "algorithm.reference_every"):
            t.drop(ours)


def _weights(t: Translation) -> None:
    """Importance weights, routing replay, and the format in which the rollout's weights are stored."""
    if t.get("use-tis", False):
        t.put("use-tis", "correction.kind", "tis")
        t.put("tis-clip", "correction.high", float(t.get("tis-clip", 2.0)))
        t.put("tis-clip-low", "correction.low", float(t.get("tis-clip-low", 0.0)))
    mode = "r3" if t.get("use-rollout-routing-replay", False) else "r2" if t.get("use-routing-replay", False) else "off"
    t.put(["use-rollout-routing-replay", "use-routing-replay"], "replay.mode", mode)
    t.put("hf-checkpoint", "precision.format", "bf16")
    t.to_do.append("precision.format: set it to the format of --hf-checkpoint if that is quantized")


def _gpus(t: Translation) -> None:
    """Nodes, data-parallel ranks and servers."""
    nodes, per_node = t.get("actor-num-nodes", 1), t.get("actor-num-gpus-per-node", 8)
    colocate, width = t.get("colocate", False), t.get("rollout-num-gpus-per-engine", 1)
    trained = nodes * per_node
    served = trained if colocate else t.get("rollout-num-gpus", trained)
    names = ["actor-num-nodes", "actor-num-gpus-per-node"]
    t.put("colocate", "cluster.colocate", bool(colocate))
    t.put("actor-num-gpus-per-node", "cluster.gpus_per_node", per_node)
    total = nodes if colocate else nodes + math.ceil(served / per_node)
    t.put(names if colocate else [*names, "rollout-num-gpus"], "cluster.nodes", total)
    replica = math.prod(t.ours.get(f"parallel.{name}", 1) for name in ("tp", "pp", "cp"))
    if trained % replica:
        t.to_do.append(f"parallel.dp: {trained} GPUs are not a multiple of tp x pp x cp = {replica}")
    else:
        t.put(names, "parallel.dp", trained // replica, f"{trained} GPUs / (tp x pp x cp = {replica})")
    t.put("rollout-num-gpus-per-engine", "rollout.sglang.tp_size", width)
    t.put(
        ["rollout-num-gpus-per-engine", *names], "rollout.servers", max(1, served // width), f"{served} GPUs / {width}"
    )
    if not t.ours["parallel.sequence_parallel"] and t.ours.get("parallel.tp", 1) == 1:
        t.drop("parallel.sequence_parallel")  # without effect


def _evaluation(t: Translation) -> None:
    sets: Any = t.get("eval-prompt-data", [])
    limit = t.get("eval-max-response-len")
    for name, file in zip(sets[::2], sets[1::2], strict=False):
        t.put("eval-prompt-data", f"eval.sets.{name}.path", path(file))
        if limit is not None:
            t.put("eval-max-response-len", f"eval.sets.{name}.max_new_tokens", limit)


def _reward(t: Translation) -> None:
    custom, kind = t.get("custom-rm-path"), t.get("rm-type")
    if custom is not None:
        module, _, function = str(custom).rpartition(".")
        t.put("custom-rm-path", "reward.name", f"{module}:{function}")
        t.put("custom-rm-path", "reward.style", "slime")
        t.leave("rm-type", "the custom function has precedence")
        return
    if kind is None:
        t.to_do.append("reward.name: no --rm-type and no --custom-rm-path")
        return
    t.apply({"rm-type": Rule("reward.name", one_of(REWARDS, "among the rewards in docs/rewards.md"))})
    if t.ours.get("reward.name") == "remote":
        t.apply({"rm-url": Rule("reward.remote.url")})
    elif "reward.name" not in t.ours:
        t.to_do.append(f"reward.name: {kind!r} has no counterpart")
