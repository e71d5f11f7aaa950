"""verl's keys: verl/trainer/config/_generated_ppo_megatron_trainer.yaml of verl 0.8.0.dev (commit b178a3c), whose FSDP
variant differs in `fsdp_config` and the names of the schedule."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_like.config.foreign.translation import (
    Rule,
    Translation,
    never_below_0,
    one_of,
    only,
    path,
    positive,
)

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.actor.megatron"
T = f"{M}.override_transformer_config"
ADVANTAGES = {
    "gae": "ppo",
    "grpo": "grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "rloo": "rloo",
    "remax": "remax",
    "opo": "opo",
}
LOSSES = {"vanilla": "clipped", "gspo": "gspo", "sapo": "sapo", "clip_cov": "clip_cov", "kl_cov": "kl_cov"}
_COV = f"{A}.policy_loss"
COVARIANCE: dict[str, dict[str, Rule]] = {  # loss -> keys that it alone has, with the defaults of PolicyLossConfig
    "clip_cov": {
        f"{_COV}.clip_cov_ratio": Rule("algorithm.cov_ratio", default=2e-4),
        f"{_COV}.clip_cov_lb": Rule("algorithm.cov_low", default=1.0),
        f"{_COV}.clip_cov_ub": Rule("algorithm.cov_high", default=5.0),
    },
    "kl_cov": {
        f"{_COV}.kl_cov_ratio": Rule("algorithm.cov_ratio", default=2e-4),
        f"{_COV}.ppo_kl_coef": Rule("algorithm.cov_coefficient", default=0.1),
    },
}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
ESTIMATORS = {"abs": "abs", "kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
RULES: dict[str, Rule] = {
    "data.prompt_key": Rule("data.prompt_key"),
    "data.max_prompt_length": Rule("data.max_prompt_tokens"),
    "data.max_response_length": Rule("rollout.max_new_tokens", default=512),
    "data.train_batch_size": Rule("train.groups_per_step", default=1024),
    "data.seed": Rule("seed"),
    "actor_rollout_ref.model.path": Rule("model.path", path),
    "actor_rollout_ref.model.lora_rank": Rule("lora.rank", positive),
    "actor_rollout_ref.model.lora_alpha": Rule("lora.alpha"),
    "actor_rollout_ref.model.lora.alpha": Rule("lora.alpha"),
    "actor_rollout_ref.model.lora.rank": Rule("lora.rank", positive),
    f"{A}.optim.lr": Rule("optimizer.lr"),
    f"{A}.optim.weight_decay": Rule("optimizer.weight_decay", default=0.01),
    f"{A}.optim.clip_grad": Rule("optimizer.clip_grad"),
    f"{A}.optim.lr_warmup_steps": Rule("optimizer.warmup_steps", positive),
    f"{A}.optim.lr_decay_style": Rule("optimizer.schedule", one_of(SCHEDULES)),
    f"{A}.optim.lr_scheduler_type": Rule("optimizer.schedule", one_of(SCHEDULES)),
    f"{A}.optim.min_lr": Rule("optimizer.min_lr", positive),
    f"{A}.optim.lr_decay_steps": Rule("optimizer.decay_steps"),
    f"{A}.optim.lr_wsd_decay_steps": Rule("optimizer.wsd_decay_steps"),
    f"{A}.ppo_max_token_len_per_gpu": Rule("train.max_tokens_per_rank", default=16384),
    f"{A}.ppo_epochs": Rule(
        "", only(1, "each rollout is trained on once: raise train.steps_per_rollout or lower the batch")
    ),
    f"{A}.clip_ratio_c": Rule("algorithm.clip_dual", default=3.0),
    f"{A}.entropy_coeff": Rule("algorithm.entropy_coefficient", positive),
    f"{A}.loss_agg_mode": Rule("algorithm.aggregation", one_of(AGGREGATIONS)),
    f"{A}.policy_loss.loss_mode": Rule("algorithm.loss", one_of(LOSSES)),
    f"{A}.tau_pos": Rule("algorithm.tau_pos"),
    f"{A}.tau_neg": Rule("algorithm.tau_neg"),
    f"{A}.router_replay.mode": Rule(
        "replay.mode", one_of({"disabled": "off", "R2": "r2", "R3": "r3"}), default="disabled"
    ),
    f"{A}.checkpoint.async_save": Rule("checkpoint.asynchronous"),
    f"{M}.tensor_model_parallel_size": Rule("parallel.tp"),
    f"{M}.pipeline_model_parallel_size": Rule("parallel.pp"),
    f"{M}.virtual_pipeline_model_parallel_size": Rule("parallel.vpp"),
    f"{M}.context_parallel_size": Rule("parallel.cp"),
    f"{M}.expert_model_parallel_size": Rule("parallel.ep"),
    f"{M}.expert_tensor_parallel_size": Rule("parallel.etp"),
    f"{M}.sequence_parallel": Rule("parallel.sequence_parallel"),
    f"{T}.recompute_granularity": Rule("train.recompute"),
    f"{T}.apply_rope_fusion": Rule("kernels.rope_fusion"),
    f"{T}.moe_grouped_gemm": Rule("kernels.grouped_gemm"),
    f"{T}.moe_permute_fusion": Rule("kernels.permute_fusion"),
    f"{T}.moe_token_dispatcher_type": Rule("kernels.dispatcher"),
    f"{T}.moe_shared_expert_overlap": Rule("kernels.overlap_shared_expert"),
    f"{T}.moe_aux_loss_coeff": Rule("train.router_aux_loss", positive),
    f"{T}.moe_router_bias_update_rate": Rule("train.router_bias_update_rate", positive),
    f"{A}.optim.override_optimizer_config.optimizer_offload_fraction": Rule("kernels.offload_optimizer", float),
    f"{R}.name": Rule("rollout.engine", one_of({"sglang": "sglang", "vllm": "vllm"}, "among the engines")),
    f"{R}.n": Rule("train.samples_per_group", default=1),
    f"{R}.temperature": Rule("rollout.temperature"),
    f"{R}.top_p": Rule("rollout.top_p"),
    f"{R}.top_k": Rule("rollout.top_k"),
    f"{R}.val_kwargs.n": Rule("eval.samples"),
    "algorithm.adv_estimator": Rule("algorithm.advantage", one_of(ADVANTAGES), default="gae"),
    "trainer.total_training_steps": Rule("train.steps"),
    "trainer.nnodes": Rule("cluster.nodes"),
    "trainer.n_gpus_per_node": Rule("cluster.gpus_per_node", default=8),
    "trainer.save_freq": Rule("checkpoint.every", never_below_0),
    "trainer.max_actor_ckpt_to_keep": Rule("checkpoint.keep"),
    "trainer.test_freq": Rule("eval.every", never_below_0, default=-1),
    "actor_rollout_ref.hybrid_engine": Rule("cluster.colocate", default=True),
}
REASONS = {
    f"{A}.fsdp_config": "setting of FSDP; the trainer is Megatron's: choose a layout in [parallel]",
    f"{A}.strategy": "the trainer is always Megatron's",
    f"{A}.use_dynamic_bsz": "micro-batches are always packed to train.max_tokens_per_rank",
    f"{A}.ppo_micro_batch_size": "micro-batches are packed to train.max_tokens_per_rank, not counted in samples",
    f"{A}.calculate_entropy": "the entropy is always measured",
    f"{A}.policy_loss.": "of another policy loss than the one that is chosen",
    f"{A}.shuffle": "the groups of a step have the order in which they were sampled",
    f"{A}.": "setting of verl's actor workers",
    f"{A}.optim.": "setting of verl's optimizer; here it is AdamW with the keys of [optimizer]",
    f"{A}.optim.override_optimizer_config.": "set by kernels.offload_optimizer",
    f"{M}.": "setting of verl's Megatron workers",
    f"{M}.param_offload": "with cluster.colocate trainer and servers release their memory to each other",
    f"{M}.grad_offload": "with cluster.colocate trainer and servers release their memory to each other",
    f"{M}.optimizer_offload": "with cluster.colocate trainer and servers release their memory to each other",
    f"{T}.": "setting of Megatron; the trainer sets what the model and [kernels] need",
    "actor_rollout_ref.ref.": "the reference has the actor's layout and packing",
    f"{R}.": "setting of verl's rollout workers",
    f"{R}.log_prob": "log-probabilities are packed as training is",
    f"{R}.calculate_log_probs": "the servers' log-probabilities are always kept",
    f"{R}.enable_rollout_routing_replay": "the servers return routes where replay.mode = 'r3'",
    f"{R}.multi_turn.": "episodes of several turns: write an environment and name it in rollout.environment",
    f"{R}.agent.": "episodes of several turns: write an environment and name it in rollout.environment",
    f"{R}.val_kwargs.": "evaluation samples as training does, at eval.temperature",
    "actor_rollout_ref.model.": "setting of verl's model workers",
    "actor_rollout_ref.model.lora": "choose lora.targets: attention, experts, shared_experts, mlp",
    "actor_rollout_ref.model.target_modules": "choose lora.targets: attention, experts, shared_experts, mlp",
    "actor_rollout_ref.model.override_config": "read from the model's config.json",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "set train.recompute",
    "actor_rollout_ref.model.use_remove_padding": "samples are always packed without padding",
    "algorithm.": "no algorithm here has this setting",
    "algorithm.rollout_correction.": "see docs/corrections.md: set correction.kind, level, low and high",
    "critic.": "the critic has the actor's layout and packing; critic.lr and algorithm.value_clip are its keys",
    "custom_reward_function.": "arguments of a reward: bind them in a function and name that in reward.name",
    "data.filter_overlong_prompts": "a prompt above data.max_prompt_tokens is rejected: filter the file",
    "data.truncation": "a prompt above data.max_prompt_tokens is rejected, never truncated",
    "data.shuffle": "prompts are always shuffled, by `seed`",
    "data.": "setting of verl's data loader",
    "global_profiler.": "setting of verl's profiler",
    "ray_kwargs.": "pass --ray-address to join a Ray cluster",
    "reward": "setting of verl's reward workers; see docs/rewards.md for rewards by a model or a server",
    "trainer.balance_batch": "micro-batches are always balanced over data-parallel ranks",
    "trainer.default_local_dir": "pass --run-dir",
    "trainer.resume": "--resume",
    "trainer.total_epochs": "train.steps is the length of a run",
    "trainer.val_before_train": "held-out prompts are always evaluated before the first step",
    "trainer.": "setting of verl's trainer",
    "transfer_queue.": "setting of verl's transport",
}


def translate(t: Translation) -> None:
    """Fill `t` from verl's keys."""
    t.apply(RULES)
    t.put(f"{R}.quantization", "precision.format", "bf16", "of the rollout's weights")
    _data(t)
    _batches(t)
    _clip(t)
    _adam(t)
    _kl(t)
    _engine(t)
    _evaluation(t)
    _reward(t)
    t.finish(REASONS)


def _files(value: Any) -> list[str]:
    return [path(one) for one in value] if isinstance(value, list) else [path(value)]


def _data(t: Translation) -> None:
    train = _files(t.get("data.train_files", []) or [])
    if len(train) == 1:
        t.put("data.train_files", "data.train", train[0])
    for i, one in enumerate(train if len(train) > 1 else []):
        t.put("data.train_files", f"data.sources.source{i}.path", one)
    for i, one in enumerate(_files(t.get("data.val_files", []) or [])):
        t.put("data.val_files", "data.eval" if i == 0 else f"eval.sets.set{i}.path", one)


def _batches(t: Translation) -> None:
    """Prompts of an optimizer step -> optimizer steps of a rollout; GPUs -> data-parallel ranks."""
    mini, prompts = f"{A}.ppo_mini_batch_size", t.ours["train.groups_per_step"]
    size = t.get(mini, 256)
    if prompts % size:
        t.leave(mini, f"{size} does not divide data.train_batch_size = {prompts}: set train.steps_per_rollout")
    elif prompts > size:
        t.put([mini, "data.train_batch_size"], "train.steps_per_rollout", prompts // size)
    if "trainer.total_training_steps" not in t.given:
        epochs = t.get("trainer.total_epochs", 30)
        t.leave("trainer.total_epochs", "train.steps is the length of a run")
        t.to_do.append(f"train.steps: verl trains {epochs} epochs, of as many steps as rows / {prompts}")


def _clip(t: Translation) -> None:
    """The bounds and keys of the loss. Both bounds are clip_ratio where they are not given."""
    loss = t.ours.get("algorithm.loss", "clipped")
    t.apply(COVARIANCE.get(loss, {}))
    if loss in ("sapo", *COVARIANCE):
        t.drop("algorithm.clip_dual")
    if loss != "sapo":
        t.drop("algorithm.tau_pos")
        t.drop("algorithm.tau_neg")
    if loss in ("sapo", "kl_cov"):
        for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            t.leave(f"{A}.{key}", f"the loss {loss!r} clips no ratio")
        return
    both = t.get(f"{A}.clip_ratio", 0.2)
    for side in ("low", "high"):
        t.put(
            [f"{A}.clip_ratio_{side}", f"{A}.clip_ratio"],
            f"algorithm.clip_{side}",
            t.get(f"{A}.clip_ratio_{side}", both),
        )


def _adam(t: Translation) -> None:
    beta1, beta2 = t.get(f"{A}.optim.betas", [0.9, 0.999])
    t.put(f"{A}.optim.betas", "optimizer.beta1", beta1)
    t.put(f"{A}.optim.betas", "optimizer.beta2", beta2)
    name = f"{A}.optim.override_optimizer_config.optimizer_cpu_offload"
    if not t.get(name, False):
        t.drop("kernels.offload_optimizer")
    if "kernels.dispatcher" in t.ours and t.get(f"{T}.moe_enable_deepep", False):
        t.put([f"{T}.moe_enable_deepep"], "kernels.flex_backend", "deepep")
    if t.ours.get("algorithm.advantage") == "ppo":
        t.apply(
            {
                "critic.optim.lr": Rule("critic.lr", default=1e-5),
                "critic.cliprange_value": Rule("algorithm.value_clip", default=0.5),
            }
        )
        t.apply({"algorithm.lam": Rule("algorithm.gae_lambda")})
    if t.ours.get("algorithm.advantage") in ("ppo", "reinforce_pp"):
        t.apply({"algorithm.gamma": Rule("algorithm.gamma")})
    if t.ours.get("algorithm.advantage") == "grpo":
        t.apply({"algorithm.norm_adv_by_std_in_grpo": Rule("algorithm.normalize_std")})


def _kl(t: Translation) -> None:
    """The penalty of the loss, or the one of the reward."""
    in_loss, in_reward = t.get(f"{A}.use_kl_loss", False), t.get("algorithm.use_kl_in_reward", False)
    of_loss = (f"{A}.use_kl_loss", f"{A}.kl_loss_coef", f"{A}.kl_loss_type", t.get(f"{A}.kl_loss_type", "low_var_kl"))
    of_reward = (
        "algorithm.use_kl_in_reward",
        "algorithm.kl_ctrl.kl_coef",
        "algorithm.kl_penalty",
        t.get("algorithm.kl_penalty", "kl"),
    )
    values = {names: t.get(names[1], 0.001) for names in (of_loss, of_reward)}
    if in_loss and in_reward:
        t.to_do.append("algorithm.kl_in: verl applies the KL penalty in both loss and reward; one place is supported")
    for on, place, names in ((in_loss, "loss", of_loss), (in_reward and not in_loss, "reward", of_reward)):
        switch, coefficient, kind, estimator = names
        if on and values[names]:
            t.put([switch, coefficient], "algorithm.kl_coefficient", values[names])
            t.put(switch, "algorithm.kl_in", place)
            t.apply({kind: Rule("algorithm.kl_estimator", one_of(ESTIMATORS), default=estimator)})
            continue
        for name in (switch, coefficient, kind):
            t.leave(name, "without a KL penalty there, which is the default")


def _engine(t: Translation) -> None:
    if "lora.rank" not in t.ours:
        t.drop("lora.alpha")
    engine = t.ours.get("rollout.engine")
    names: Mapping[str, str] = {
        "tensor_model_parallel_size": {"vllm": "tensor_parallel_size"}.get(str(engine), "tp_size"),
        "gpu_memory_utilization": {"vllm": "gpu_memory_utilization"}.get(str(engine), "mem_fraction_static"),
        "max_num_seqs": {"vllm": "max_num_seqs"}.get(str(engine), "max_running_requests"),
        "max_model_len": {"vllm": "max_model_len"}.get(str(engine), "context_length"),
    }
    if engine is None:
        t.to_do.append("rollout.engine: sglang or vllm")
        return
    usual = {"tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.5}
    t.apply({f"{R}.{a}": Rule(f"rollout.{engine}.{b}", default=usual.get(a)) for a, b in names.items()})
    if engine == "vllm":
        t.put(f"{R}.name", "publish.path", "disk", "because vLLM reads published weights from a directory")
        t.apply({f"{R}.enforce_eager": Rule("rollout.vllm.enforce_eager")})
    elif (experts := t.get(f"{R}.expert_parallel_size", 1)) > 1:
        t.put(f"{R}.expert_parallel_size", "rollout.sglang.ep_size", experts)
    from_gpus(
        t,
        ["trainer.nnodes", "trainer.n_gpus_per_node"],
        f"{R}.tensor_model_parallel_size",
        t.ours[f"rollout.{engine}.{names['tensor_model_parallel_size']}"],
    )


def from_gpus(t: Translation, gpus: list[str], width_key: str, width: int) -> None:
    """Data-parallel ranks and servers, of all GPUs of the run."""
    count = t.ours.get("cluster.nodes", 1) * t.ours["cluster.gpus_per_node"]
    shards = [t.ours.get(f"parallel.{name}", 1) for name in ("tp", "pp", "cp")]
    a_replica = shards[0] * shards[1] * shards[2]
    if count % a_replica:
        t.to_do.append(f"parallel.dp: {count} GPUs are not a multiple of tp x pp x cp = {a_replica}")
    else:
        t.put(gpus, "parallel.dp", count // a_replica, f"{count} GPUs / (tp x pp x cp = {a_replica})")
    t.put([*gpus, width_key], "rollout.servers", max(1, count // width), f"{count} GPUs / {width} of a server")


def _evaluation(t: Translation) -> None:
    sampled = t.get(f"{R}.val_kwargs.do_sample", False)
    t.put(f"{R}.val_kwargs.do_sample", "eval.greedy", not sampled)
    temperature = t.get(f"{R}.val_kwargs.temperature", 0)
    if sampled and temperature:
        t.put(f"{R}.val_kwargs.temperature", "eval.temperature", temperature)
    else:
        t.leave(f"{R}.val_kwargs.temperature", "of answers that are not sampled")


def _reward(t: Translation) -> None:
    file, name = t.get("custom_reward_function.path"), t.get("custom_reward_function.name", "compute_score")
    if file is not None:
        t.put(["custom_reward_function.path", "custom_reward_function.name"], "reward.name", f"{path(file)}:{name}")
        t.put("custom_reward_function.path", "reward.style", "verl")
    else:
        t.to_do.append("reward.name: verl chooses a reward by each row's data_source; choose one of docs/rewards.md")
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg"
    if t.get(f"{overlong}.enable", False):
        t.apply(
            {
                f"{overlong}.penalty_factor": Rule("algorithm.overlong_penalty", default=1.0),
                f"{overlong}.len": Rule("algorithm.overlong_buffer"),
            }
        )
        t.leave(f"{overlong}.enable", "enabled by algorithm.overlong_penalty above 0")
        t.leave("reward_model.reward_kwargs.max_resp_len", "rollout.max_new_tokens is the limit")
