"""Keys of prime-rl 0.8.0 (commit 559b447, packages/prime-rl-configs/src/prime_rl/configs): the file of `rl`."""

from __future__ import annotations

from typing import Any

from miles_like.config.foreign.translation import Rule, Translation, one_of, path

ORCH, V = "orchestrator", "inference.vllm"
ALGORITHMS = {"grpo": "grpo", "max_rl": "maxrl"}
SCHEDULES = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
RULES: dict[str, Rule] = {
    "model.name": Rule("model.path", path),
    "max_steps": Rule("train.steps"),
    f"{ORCH}.group_size": Rule("train.samples_per_group", default=1),
    f"{ORCH}.max_off_policy_steps": Rule("buffer.max_staleness", default=8),
    f"{ORCH}.train.sampling.temperature": Rule("rollout.temperature"),
    f"{ORCH}.algo.type": Rule("algorithm.advantage", one_of(ALGORITHMS), default="grpo"),
    f"{ORCH}.eval.interval": Rule("eval.every"),
    f"{ORCH}.eval.group_size": Rule("eval.samples"),
    f"{ORCH}.eval.sampling.temperature": Rule("eval.temperature"),
    "trainer.optim.type": Rule("", one_of({"adamw": None}, "among the optimizers")),
    "trainer.optim.lr": Rule("optimizer.lr"),
    "trainer.optim.weight_decay": Rule("optimizer.weight_decay", default=0.01),
    "trainer.optim.max_norm": Rule("optimizer.clip_grad"),
    "trainer.scheduler.type": Rule("optimizer.schedule", one_of(SCHEDULES)),
    "trainer.scheduler.warmup_steps": Rule("optimizer.warmup_steps"),
    "trainer.scheduler.min_lr": Rule("optimizer.min_lr"),
    "trainer.enable_router_replay": Rule("replay.mode", one_of({True: "r3", False: "off"}), default=False),
    "trainer.model.ep": Rule("parallel.ep", lambda value: None if value == "auto" else value),
    "trainer.model.cp": Rule("parallel.cp"),
    "trainer.model.lora.rank": Rule("lora.rank"),
    "trainer.model.lora.alpha": Rule("lora.alpha"),
    "trainer.model.moe_use_grouped_mm": Rule("kernels.grouped_gemm", default=True),
    "ckpt.interval": Rule("checkpoint.every"),
    "ckpt.keep_last": Rule("checkpoint.keep"),
    "ckpt.keep_interval": Rule("checkpoint.keep_every"),
    f"{V}.tensor_parallel_size": Rule("rollout.vllm.tensor_parallel_size"),
    f"{V}.gpu_memory_utilization": Rule("rollout.vllm.gpu_memory_utilization", default=0.9),
    f"{V}.max_model_len": Rule("rollout.vllm.max_model_len"),
    f"{V}.enforce_eager": Rule("rollout.vllm.enforce_eager"),
    f"{V}.enable_expert_parallel": Rule("rollout.vllm.enable_expert_parallel"),
    f"{V}.quantization": Rule("precision.format", one_of({"fp8": "fp8"}), default=None),
    "deployment.gpus_per_node": Rule("cluster.gpus_per_node", default=8),
}
VERIFIERS = "an environment of verifiers: name a data file and a reward, or write an environment (docs/extending.md)"
REASONS = {
    f"{ORCH}.train.source": VERIFIERS,
    f"{ORCH}.eval.source": VERIFIERS,
    f"{ORCH}.eval.": "evaluation samples as training does, except for the keys of [eval]",
    f"{ORCH}.renderer": "the tokenizer's chat template is used",
    f"{ORCH}.concurrency": "rollout.prompts_per_request, and the engine's own limit of samples",
    f"{ORCH}.token_batch_size": "a step is sized in groups: set train.groups_per_step",
    f"{ORCH}.": "setting of prime-rl's orchestrator",
    f"{ORCH}.algo.": "no algorithm here has this setting",
    "trainer.loss.": "prime-rl's loss masks tokens by the difference of probabilities; choose algorithm.loss",
    "trainer.model.ac": "train.recompute = 'full'",
    "trainer.model.": "of prime-rl's FSDP trainer: the trainer is Megatron's, see [parallel] and [kernels]",
    "trainer.": "setting of prime-rl's trainer",
    "inference.": "setting of prime-rl's inference server",
    f"{V}.enable_return_routed_experts": "the servers return routes where replay.mode = 'r3'",
    f"{V}.": "no key sets this vLLM flag",
    "weight_broadcast.": "publish.path",
    "monitors.": "trackers are not configured in the run's file",
    "log.": "--log-level",
    "slurm.": "pass --ray-address to join a Ray cluster",
    "resume": "--resume",
    "run.": "pass --run-dir",
    "output_dir": "pass --run-dir",
    "env_vars.": "set [cluster.env] and [rollout.env]",
    "tokenizer.": "the model's tokenizer is used",
    "deployment.": "setting of prime-rl's launcher",
}


def translate(t: Translation) -> None:
    """Fill `t` from prime-rl's keys."""
    t.apply(RULES)
    t.put(f"{V}.model", "rollout.engine", "vllm", "prime-rl's engine")
    t.put("weight_broadcast.type", "publish.path", "disk", "because vLLM reads published weights from a directory")
    if "precision.format" not in t.ours:
        t.put(f"{V}.quantization", "precision.format", "bf16")
    _algorithm(t)
    _lengths(t)
    _batch(t)
    _gpus(t)
    t.to_do.append(f"data.train and reward.name: {VERIFIERS}")
    t.finish(REASONS)


def _algorithm(t: Translation) -> None:
    """Its GRPO subtracts the group's mean and divides by nothing."""
    if t.ours.get("algorithm.advantage") == "grpo":
        t.put(f"{ORCH}.algo.type", "algorithm.normalize_std", False, "prime-rl subtracts the group's mean only")
    decay = t.get("trainer.scheduler.decay_steps")
    if decay is not None:
        t.leave(
            "trainer.scheduler.decay_steps",
            "the last steps of the run; optimizer.schedule = 'wsd' with wsd_decay_steps",
        )
    if t.ours.get("optimizer.schedule", "constant") == "constant":
        t.drop("optimizer.warmup_steps")
    if t.get(f"{ORCH}.train.filter_zero_advantages", True):
        t.to_do.append(
            "algorithm.filter: prime-rl drops groups of equal rewards from a full batch; 'nonzero_std' "
            "samples others in their place"
        )
        t.leave(f"{ORCH}.train.filter_zero_advantages", "see algorithm.filter")


def _lengths(t: Translation) -> None:
    """`seq_len` bounds prompt and response together; a trainer's micro-batch holds one such sequence."""
    shared = t.get("seq_len", 2048)
    trained = t.get("trainer.model.seq_len", shared)
    t.put(["trainer.model.seq_len", "seq_len"], "train.max_tokens_per_rank", trained)
    response = t.get(f"{ORCH}.train.sampling.max_completion_tokens")
    whole = t.get(f"{ORCH}.seq_len", shared)
    if response is None:
        prompt = min(512, whole // 2)
        t.put(
            [f"{ORCH}.seq_len", "seq_len"], "rollout.max_new_tokens", whole - prompt, f"without {prompt} of the prompt"
        )
    else:
        t.put(f"{ORCH}.train.sampling.max_completion_tokens", "rollout.max_new_tokens", response)


def _batch(t: Translation) -> None:
    """Samples of a step -> prompts of a step."""
    samples, group = t.get(f"{ORCH}.batch_size"), t.ours["train.samples_per_group"]
    if samples is None:
        t.to_do.append("train.groups_per_step: the file sizes a step in tokens, or not at all")
    elif samples % group:
        t.leave(
            f"{ORCH}.batch_size",
            f"{samples} samples are not a multiple of groups of {group}: set train.groups_per_step",
        )
    else:
        t.put(
            [f"{ORCH}.batch_size", f"{ORCH}.group_size"],
            "train.groups_per_step",
            samples // group,
            f"{samples} / {group}",
        )


def _gpus(t: Translation) -> None:
    """Trainer ranks and servers have separate GPUs."""
    per_node: Any = t.ours["cluster.gpus_per_node"]
    if t.get("deployment.type", "single_node") == "single_node":
        trained, served = t.get("deployment.num_train_gpus", 1), t.get("deployment.num_infer_gpus", 1)
        names = ["deployment.num_train_gpus", "deployment.num_infer_gpus"]
        t.put(names, "cluster.pools.trainer.gpus", _span(0, trained))
        t.put(names, "cluster.pools.rollout.gpus", _span(trained, served))
        nodes = 1
    else:
        names = ["deployment.num_train_nodes", "deployment.num_infer_nodes", "deployment.num_infer_replicas"]
        train_nodes = t.get("deployment.num_train_nodes", 1)
        rollout_nodes = t.get("deployment.num_infer_nodes", 1) * t.get("deployment.num_infer_replicas", 1)
        trained, served, nodes = train_nodes * per_node, rollout_nodes * per_node, train_nodes + rollout_nodes
        t.leave("deployment.type", "the number of nodes is cluster.nodes")
    t.put(names, "cluster.nodes", nodes)
    t.put(names, "cluster.colocate", False)
    width = t.ours.get("rollout.vllm.tensor_parallel_size", 1)
    t.put([*names, f"{V}.tensor_parallel_size"], "rollout.servers", max(1, served // width), f"{served} GPUs / {width}")
    shards = t.ours.get("parallel.cp", 1)
    t.put(
        names,
        "parallel.dp",
        max(1, trained // shards),
        f"{trained} GPUs / cp {shards}; raise parallel.tp for large models",
    )


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{first}-{first + count - 1}"
