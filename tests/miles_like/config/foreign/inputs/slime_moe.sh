#!/bin/bash
# Flags of slime 0.3.1, commit 624b824: slime/utils/arguments.py and Megatron's
set -e
ray stop --force || true
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
ROOT=/data

CKPT_ARGS=(
   --hf-checkpoint ${ROOT}/GLM-4.5-Air
   # --hf-checkpoint ${ROOT}/GLM-4.5-Air-FP8
   --ref-load ${ROOT}/GLM-4.5-Air_torch_dist
   --save "${ROOT}/out"
   --save-interval 25
)
ROLLOUT_ARGS=(
   --prompt-data ${ROOT}/dapo.jsonl
   --input-key prompt
   --label-key label
   --apply-chat-template
   --rollout-shuffle
   --rm-type deepscaler
   --num-rollout 200
   --rollout-batch-size 64
   --over-sampling-batch-size 96
   --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
   --n-samples-per-prompt 8
   --rollout-max-response-len $((8 * 1024))
   --rollout-temperature 0.8
   --global-batch-size 256
)
ROLLOUT_ARGS+=(--balance-data)
EVAL_ARGS=(--eval-interval 20 --eval-prompt-data aime ${ROOT}/aime.jsonl --n-samples-per-eval-prompt 16 --eval-max-response-len 16384)
GRPO_ARGS=(
   --advantage-estimator gspo
   --eps-clip 3e-4
   --eps-clip-high 4e-4
   --use-kl-loss
   --kl-loss-coef 0.00
   --use-tis
   --use-rollout-routing-replay
)
PERF_ARGS=(
   --tensor-model-parallel-size 4 --sequence-parallel
   --pipeline-model-parallel-size 2
   --expert-model-parallel-size 8
   --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
   --use-dynamic-batch-size
   --max-tokens-per-gpu 16384
)
OPTIMIZER_ARGS=(--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.98)
SGLANG_ARGS=(--rollout-num-gpus-per-engine 8 --sglang-mem-fraction-static 0.7 --sglang-cuda-graph-max-bs 64)

ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \
   --actor-num-nodes 4 \
   --actor-num-gpus-per-node 8 \
   --colocate \
   ${CKPT_ARGS[@]} ${ROLLOUT_ARGS[@]} "${EVAL_ARGS[@]}" ${GRPO_ARGS[@]} \
   ${PERF_ARGS[@]} ${OPTIMIZER_ARGS[@]} ${SGLANG_ARGS[@]} \
   --num-layers 46 --num-experts 128 2>&1 | tee out.log
