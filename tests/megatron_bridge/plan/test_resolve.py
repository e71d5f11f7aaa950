"""Kernels, precision and overlaps as resolved values: what megatron's own classes take, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_bridge.device.device import init_device
from tests.support import toy
from tests.support.refusals import Facts, refuses
from tests.support.tiny_models import tiny, tiny_dense, tiny_glm, tiny_qwen

init_device()

from megatron.core.distributed import DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig  # noqa: E402

from megatron_bridge.families.keywords import TransformerKeywords  # noqa: E402
from megatron_bridge.plan.deterministic import environment  # noqa: E402
from megatron_bridge.plan.keywords import DdpKeywords, OptimizerKeywords  # noqa: E402
from megatron_bridge.plan.resolve import Resolved, resolve  # noqa: E402
from miles_like.config.load import load_config  # noqa: E402
from miles_like.config.ranks import trainer_config  # noqa: E402

CONFIGS = Path(__file__).parents[3] / "configs"
WIDE = tiny(  # every linear's inputs are multiples of 128, as blockwise FP8 wants
    hidden_size=256,
    intermediate_size=512,
    moe_intermediate_size=256,
    q_lora_rank=128,
    kv_lora_rank=128,
    num_attention_heads=8,
    num_key_value_heads=8,
    qk_nope_head_dim=32,
    qk_rope_head_dim=32,
    v_head_dim=32,
)
H100, BLACKWELL = (9, 0), (10, 0)


def _resolved(hf: dict[str, Any], kernels: dict[str, Any], *, cuda: bool = True, **more: Any) -> Resolved:
    ask = {k: more.pop(k) for k in ("te", "capability") if k in more}
    config = toy.config("", dtype=more.pop("dtype", "bfloat16"), kernels=kernels, **more)
    return resolve(config, hf, cuda=cuda, **({"te": True} | ask if cuda else ask))


def _built(resolved: Resolved) -> tuple[Any, Any, Any]:
    assert resolved.multi_latent_attention
    return (
        MLATransformerConfig(**resolved.transformer),
        DistributedDataParallelConfig(**resolved.ddp),
        OptimizerConfig(**resolved.optimizer),
    )


def test_the_shipped_deepseek_recipe_is_what_megatron_takes_for_128_h100() -> None:
    """The recipe's own layout and the model's real shapes. Fused permutation is left out of what is built: megatron
    imports TransformerEngine's kernels to accept it. Not covered: that any of it runs."""
    run = load_config(CONFIGS / "deepseek_v3_fp8.toml")
    path = Path(str(run.model.config))
    resolved = resolve(trainer_config(run, path.parent), json.loads(path.read_text()), cuda=True, te=True)
    assert resolved.spec == "te" and resolved.token_multiple == 1
    assert resolved.transformer.pop("moe_permute_fusion") is True
    tf, ddp, optimizer = _built(resolved)
    assert (tf.moe_token_dispatcher_type, tf.moe_flex_dispatcher_backend) == ("flex", "deepep")
    assert tf.moe_grouped_gemm and tf.apply_rope_fusion and tf.fp8 is None and tf.bf16
    assert tf.moe_enable_routing_replay and not tf.moe_router_fusion and tf.moe_router_dtype == "fp32"
    assert (tf.tensor_model_parallel_size, tf.expert_model_parallel_size, tf.sequence_parallel) == (8, 16, True)
    assert ddp.overlap_grad_reduce and ddp.overlap_param_gather and ddp.use_distributed_optimizer
    assert optimizer.overlap_param_gather and optimizer.optimizer_cpu_offload


@pytest.mark.parametrize(
    ("keywords", "theirs"),
    [
        (TransformerKeywords, MLATransformerConfig),
        (DdpKeywords, DistributedDataParallelConfig),
        (OptimizerKeywords, OptimizerConfig),
    ],
)
def test_keywords_are_fields_of_megatrons_classes(keywords: type, theirs: type) -> None:
    """mypy holds what is built to the keywords, this holds the keywords to megatron. Not covered: the types."""
    assert not set(keywords.__annotations__) - {field.name for field in dataclasses.fields(theirs)}


def test_the_deepseek_recipe_passes_with_blockwise_fp8_too() -> None:
    """DeepSeek-V3 was trained in 128-blocks, so its shapes must pass; the 576 outputs of the joint down projection
    are no multiple of 128 and need not be."""
    run = load_config(CONFIGS / "deepseek_v3_fp8.toml", ["kernels.fp8=blockwise", "precision.qat=false"])
    path = Path(str(run.model.config))
    hf = json.loads(path.read_text())
    resolved = resolve(trainer_config(run, path.parent), hf, cuda=True, te=True, capability=H100)
    assert (resolved.transformer["fp8"], resolved.transformer["fp8_recipe"]) == ("e4m3", "blockwise")


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_fp8_reaches_megatrons_configs_under_their_own_names(recipe: str) -> None:
    """`num_moe_experts` is left out of what is built: with experts, megatron 0.16.1 asks for the version of the
    installed TransformerEngine. The optimizer and the gradient buffer must hear of FP8 weights too."""
    kernels = {"fp8": recipe, "fp8_format": "e4m3" if recipe == "blockwise" else "hybrid", "fp8_param_gather": True}
    resolved = _resolved(WIDE, kernels, capability=H100)
    kept = "moe_token_dispatcher_type"
    dense = {k: v for k, v in resolved.transformer.items() if k == kept or "moe_" not in k}
    tf = MLATransformerConfig(**dense)
    assert (tf.fp8, tf.fp8_recipe, tf.fp8_param) == (kernels["fp8_format"], recipe, True)
    assert DistributedDataParallelConfig(**resolved.ddp).fp8_param_gather
    assert OptimizerConfig(**resolved.optimizer).fp8_recipe == recipe
    assert resolved.token_multiple == 16


def test_mxfp8_wants_blackwell() -> None:
    resolved = _resolved(WIDE, {"fp8": "mxfp8"}, capability=BLACKWELL)
    assert resolved.transformer["fp8_recipe"] == "mxfp8" and resolved.token_multiple == 32
    assert not resolved.ddp["fp8_param_gather"]


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_experts_kernels_reach_megatrons_config(backend: str) -> None:
    kernels = {"grouped_gemm": True, "dispatcher": "flex", "flex_backend": backend, "swiglu_fusion": False}
    tf = _built(_resolved(tiny(), kernels, dp=2, ep=2))[0]
    assert (tf.moe_token_dispatcher_type, tf.moe_flex_dispatcher_backend) == ("flex", backend)
    assert tf.moe_grouped_gemm and not tf.bias_activation_fusion


def test_overlaps_and_offload_reach_megatrons_configs() -> None:
    kernels = {"overlap_grad_reduce": True, "overlap_param_gather": True, "offload_optimizer": 0.25}
    tf, ddp, optimizer = _built(_resolved(tiny(), kernels | {"overlap_shared_expert": True}, dp=2, ep=2))
    assert tf.moe_shared_expert_overlap
    assert ddp.overlap_grad_reduce and ddp.overlap_param_gather and not ddp.align_param_gather
    assert optimizer.optimizer_cpu_offload and optimizer.optimizer_offload_fraction == 0.25


def test_a_default_run_is_plain_on_every_device() -> None:
    """`auto` takes TransformerEngine's modules exactly where they can work."""
    for cuda, te, spec in ((False, False, "local"), (True, False, "local"), (True, True, "te"), (False, True, "local")):
        resolved = _resolved(tiny(), {}, cuda=cuda, te=te)
        assert resolved.spec == spec and resolved.token_multiple == 1
        tf, ddp, optimizer = _built(resolved)
        assert tf.use_cpu_initialization is not cuda
        assert tf.moe_token_dispatcher_type == "alltoall" and not tf.moe_grouped_gemm and tf.fp8 is None
        assert not ddp.overlap_grad_reduce and not optimizer.optimizer_cpu_offload


def test_point_to_point_exchange_overlaps_exactly_with_virtual_stages() -> None:
    """Not a choice: megatron's batched exchange is silently wrong with them, its overlapped one is refused without."""
    for vpp in (1, 2):
        resolved = _resolved(tiny(num_hidden_layers=4), {}, cuda=False, pp=2, vpp=vpp)
        assert _built(resolved)[0].overlap_p2p_comm is (vpp > 1)


@pytest.mark.parametrize(
    ("hf", "how", "forward"),
    [
        (tiny_qwen(), {}, "batch invariant"),
        (tiny(), {}, "deterministic"),  # latent attention
        (tiny_qwen(), {"te": False}, "deterministic"),
        (tiny(), {"cuda": False}, "exact"),
    ],
)
def test_a_deterministic_trainer_has_megatrons_own_settings_on_cuda(
    hf: dict[str, Any], how: dict[str, Any], forward: str
) -> None:
    """Not covered: that a GPU then gives the same bits again."""
    from megatron.core.transformer.enums import AttnBackend

    from megatron_bridge.model.build import transformer_config

    resolved = _resolved(hf, {}, deterministic=True, **how)
    assert resolved.forward == forward
    tf = transformer_config(resolved)
    invariant = forward == "batch invariant"
    assert tf.deterministic_mode is (forward != "exact") and tf.batch_invariant_mode is invariant
    assert (tf.attention_backend is AttnBackend.flash) is invariant
    variables = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO", "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"}
    assert set(environment(resolved.forward)) == (set() if forward == "exact" else variables)
    stock = _resolved(hf, {}, **how)
    assert stock.forward == "stock" and not transformer_config(stock).deterministic_mode
    assert not environment("stock")


GRAD = {"overlap_grad_reduce": True}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], Facts]] = {
    "te on cpu": ({"spec": "te"}, {"cuda": False}, ("kernels.spec", "te", "CUDA", "auto")),
    "te not installed": ({"spec": "te"}, {"te": False}, ("kernels.spec", "te", "auto")),
    "fp8 on cpu": ({"fp8": "blockwise"}, {"cuda": False}, ("kernels.fp8", "CUDA", "CPU")),
    "grouped on cpu": ({"grouped_gemm": True}, {"cuda": False}, ("kernels.grouped_gemm", "CUDA", "CPU")),
    "flex on cpu": (
        {"dispatcher": "flex"},
        {"cuda": False, "dp": 2, "ep": 2},
        ("kernels.dispatcher", "flex", "CUDA", "CPU"),
    ),
    "offload on cpu": ({"offload_optimizer": 0.5}, {"cuda": False}, ("kernels.offload_optimizer", "CUDA", "CPU")),
    "rope on cpu": ({"rope_fusion": True}, {"cuda": False}, ("kernels.rope_fusion", "CUDA", "CPU")),
    "permute on cpu": ({"permute_fusion": True}, {"cuda": False}, ("kernels.permute_fusion", "CUDA", "CPU")),
    "fp8 without te": ({"fp8": "delayed", "spec": "local"}, {}, ("kernels.fp8", "delayed", "kernels.spec", "te")),
    "grouped without te": ({"grouped_gemm": True}, {"te": False}, ("kernels.grouped_gemm", "kernels.spec", "te")),
    "adapters in fp8": (
        {"fp8": "tensorwise"},
        {"lora": {"rank": 4, "targets": ["attention"]}},
        ("lora.rank", 4, "kernels.fp8", "tensorwise", "none", 0),
    ),
    "format alone": ({"fp8_format": "hybrid"}, {}, ("kernels.fp8_format", "fp8_param_gather", "kernels.fp8", "none")),
    "param gather alone": (
        {"fp8_param_gather": True},
        {},
        ("kernels.fp8_format", "fp8_param_gather", "kernels.fp8", "none"),
    ),
    "old device": ({"fp8": "blockwise"}, {"capability": (8, 0)}, ("kernels.fp8", "blockwise", 9.0, 8.0, "none")),
    "mxfp8 on hopper": ({"fp8": "mxfp8"}, {"capability": H100}, ("kernels.fp8", "mxfp8", 10.0, 9.0, "none")),
    "fp32": (
        {"fp8": "tensorwise"},
        {"dtype": "float32"},
        ("kernels.fp8", "tensorwise", "params_dtype", "bfloat16", "float32"),
    ),
    "hybrid blocks": (
        {"fp8": "blockwise", "fp8_format": "hybrid"},
        {},
        ("kernels.fp8", "blockwise", "e4m3", "kernels.fp8_format"),
    ),
    "narrow": (
        {"fp8": "blockwise"},
        {"hf": tiny()},
        ("kernels.fp8", "blockwise", 128, "decoder.layers.{i}.self_attention.linear_q_up_proj.weight", 64),
    ),
    "narrow under tp": (
        {"fp8": "blockwise"},
        {"tp": 8},
        ("kernels.fp8", "blockwise", 128, "decoder.layers.{i}.self_attention.linear_proj.weight", 32),
    ),
    "unsharded": (
        {"fp8": "delayed", "fp8_param_gather": True},
        {"distributed_optimizer": False},
        ("kernels.fp8_param_gather", "distributed_optimizer"),
    ),
    "fp8 offload": (
        {"fp8": "delayed", "fp8_param_gather": True, "offload_optimizer": 0.5},
        {},
        ("kernels.fp8_param_gather", "kernels.offload_optimizer", 0.5),
    ),
    "mx gather": ({"fp8": "mxfp8", "fp8_param_gather": True}, {}, ("kernels.fp8_param_gather", "kernels.fp8", "mxfp8")),
    "backend alone": (
        {"flex_backend": "hybridep"},
        {},
        ("kernels.flex_backend", "hybridep", "kernels.dispatcher", "alltoall", "flex"),
    ),
    "flex alone": ({"dispatcher": "flex"}, {}, ("kernels.dispatcher", "flex", "parallel.ep", 1, "alltoall")),
    "allgather over packs": (
        {"dispatcher": "allgather"},
        {"dp": 2, "ep": 2},
        ("kernels.dispatcher", "allgather", "parallel.pp", 1, "parallel.ep"),
    ),
    "allgather over stages": (
        {"dispatcher": "allgather"},
        {"pp": 2, "tp": 2, "ep": 2},
        ("kernels.dispatcher", "allgather", "parallel.pp", 1, "parallel.ep"),
    ),
    "no shared expert": (
        {"overlap_shared_expert": True},
        {"hf": tiny(n_shared_experts=None)},
        ("kernels.overlap_shared_expert",),
    ),
    "shared and flex": (
        {"overlap_shared_expert": True, "dispatcher": "flex"},
        {"dp": 2, "ep": 2},
        ("kernels.overlap_shared_expert", "kernels.dispatcher", "alltoall", "flex", "overlap_shared_expert"),
    ),
    "gather without reduce": (
        {"overlap_param_gather": True},
        {"cuda": False},
        ("kernels.overlap_param_gather", "distributed_optimizer", "True", "kernels.overlap_grad_reduce", "False"),
    ),
    "gather unsharded": (
        GRAD | {"overlap_param_gather": True},
        {"distributed_optimizer": False, "cuda": False},
        ("kernels.overlap_param_gather", "distributed_optimizer", "False", "kernels.overlap_grad_reduce", "True"),
    ),
    "offload unsharded": (
        {"offload_optimizer": 1.0},
        {"distributed_optimizer": False},
        ("kernels.offload_optimizer", 1.0, "distributed_optimizer"),
    ),
    "no order": (
        {"dispatcher": "flex"},
        {"dp": 2, "ep": 2, "deterministic": True},
        ("alignment.deterministic", "kernels.flex_backend", "deepep", "kernels.dispatcher", "alltoall"),
    ),
    "narrow products": (
        {"fp8": "tensorwise"},
        {"hf": tiny_qwen(), "deterministic": True},
        ("alignment.deterministic", 16, 32, "kernels.fp8", "tensorwise"),
    ),
    "grouped products": (
        {"grouped_gemm": True},
        {"hf": tiny_qwen(), "deterministic": True},
        ("alignment.deterministic", "kernels.grouped_gemm"),
    ),
    "rope that is not yarn": ({"rope_fusion": True}, {"hf": tiny(rope_scaling=None)}, ("kernels.rope_fusion", "rope")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_or_would_do_nothing_is_refused(name: str) -> None:
    """On the driver, before a rank starts; one sentence with the numbers and the remedy."""
    kernels, more, facts = REFUSED[name]
    more = dict(more)
    with refuses(ValueError, *facts):
        _resolved(more.pop("hf", WIDE), kernels, **more)


def test_draft_layers_of_a_tied_head_are_refused_over_stages() -> None:
    """Megatron trains them and then cannot save them: refused before anything starts. One stage can."""
    tied = tiny_glm(tie_word_embeddings=True, num_nextn_predict_layers=1)
    assert _resolved(tied, {}, cuda=False, mtp_coefficient=0.1).transformer["mtp_num_layers"] == 1
    with refuses(ValueError, "tie_word_embeddings", "parallel.pp", 2, "parallel.pp", 1):
        _resolved(tied, {}, cuda=False, mtp_coefficient=0.1, pp=2)


def test_replay_that_would_do_nothing_is_refused() -> None:
    """A model without experts has nothing to replay. Mode r3 is the default and passes, as "off" does; settings that a
    user must have chosen are refused with the way out."""
    for mode in ("r3", "off"):
        assert "num_moe_experts" not in _resolved(tiny_dense(), {}, cuda=False, mode=mode).transformer
    for replay, facts in (
        ({"mode": "r2"}, ("replay.mode", "r2", "off")),
        ({"mode": "r3", "gates": True}, ("replay.gates",)),
    ):
        with refuses(ValueError, *facts):
            _resolved(tiny_dense(), {}, cuda=False, replay=replay)
        _resolved(tiny(), {}, cuda=False, replay=replay)
