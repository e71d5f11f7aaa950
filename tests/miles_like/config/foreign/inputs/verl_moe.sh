#!/usr/bin/env bash
# Keys of verl 0.8.0.dev, commit b178a3c: verl/trainer/config/_generated_ppo_megatron_trainer.yaml
set -x

tp=${TRAIN_TP:-2}
prompt_len=$((1024 * 2))
response_len=$((1024 * 6))
prompts=128
OFFLOAD=(
    # of the optimizer
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=True
    +actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_offload_fraction=0.5
)

python3 -m verl.trainer.main_ppo --config-name='ppo_megatron_trainer' \
    algorithm.adv_estimator=grpo \
    data.train_files="$PWD/math/train.parquet" \
    data.val_files="['$PWD/math/aime.parquet','$PWD/math/amc.parquet']" \
    data.max_prompt_length=$prompt_len \
    data.max_response_length=${response_len} \
    data.train_batch_size=${prompts} \
    data.truncation=error \
    actor_rollout_ref.model.path=Qwen/Qwen3-30B-A3B \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$(((prompt_len + response_len) * 2)) \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.005 \
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.router_replay.mode=R3 \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=${tp} \
    actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
    actor_rollout_ref.actor.megatron.param_offload=True \
    +actor_rollout_ref.actor.megatron.override_transformer_config.moe_permute_fusion=True \
    "${OFFLOAD[@]}" \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True \
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    custom_reward_function.path=rewards/math.py \
    custom_reward_function.name=score \
    trainer.logger='["console","wandb"]' \
    trainer.nnodes=2 \
    trainer.n_gpus_per_node=8 \
    trainer.total_training_steps=400 \
    trainer.save_freq=20 \
    trainer.test_freq=-1
