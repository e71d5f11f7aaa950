"""What stock vLLM servers lack, refused before anything is started. Torch-free.

What depends on the model is refused in miles_like/run/setup/vllm_support.py.
"""

from __future__ import annotations

from megatron_bridge.config import ReplayConfig
from rollout.config import PublishConfig, RolloutConfig

_OTHERS = "or rollout.engine = 'sglang' or 'embedded'"


def check_vllm(
    rollout: RolloutConfig,
    publish: PublishConfig,
    replay: ReplayConfig,
    *,
    takes_turns: bool,
    gpus_per_node: int,
) -> None:
    """Raises ValueError, with the remedy, for settings that a run whose servers are vLLM's cannot have. What
    `alignment.deterministic` needs is checked with that section.

    takes_turns: whether trainer and servers do. gpus_per_node: those that the servers may use.
    """
    if publish.path != "disk":
        raise ValueError(
            f"publish.path = {publish.path!r}, but a vLLM server reads published weights from a directory: set "
            f"publish.path = 'disk', {_OTHERS}"
        )
    if publish.pause_mode == "in_place":
        raise ValueError(
            "publish.pause_mode = 'in_place', but a vLLM server cannot drop its prefix cache while it holds "
            "frozen requests, so later requests would reuse keys and values of the old weights: set it to "
            "'retract' or 'abort'"
        )
    if not publish.answer_tokens:
        raise ValueError(
            "publish.answer_tokens = 0, but a vLLM server hashes its fused tensors, which cannot be compared "
            "with the trainer's weights, so scoring a text is the only check of a publication: raise it"
        )
    if replay.gates and replay.mode == "r3":
        raise ValueError(
            "replay.gates = true with replay.mode = 'r3', but a vLLM server returns no gate weights: set "
            "rollout.engine = 'embedded', replay.mode = 'r2' or replay.gates = false"
        )
    if takes_turns:
        raise ValueError(
            "rollout.engine = 'vllm' cannot take turns with the trainer on a device (cluster.colocate): its "
            "servers drop their weights when they sleep, and this project cannot reload them; assign trainer and "
            f"rollout different GPUs, set cluster.colocate = false, {_OTHERS}"
        )
    width = rollout.vllm.tensor_parallel_size
    if gpus_per_node and width > gpus_per_node:
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size = {width} exceeds the {gpus_per_node} GPUs of a node that its "
            f"servers may use, and a vLLM server runs on one node only: lower it, {_OTHERS}"
        )
    if not gpus_per_node and width > 1:
        raise ValueError(
            f"rollout.vllm.tensor_parallel_size = {width} divides the model over GPUs, but cluster.gpus_per_node "
            "= 0: set tensor_parallel_size to 1"
        )
