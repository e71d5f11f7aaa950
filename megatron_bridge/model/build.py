"""Builds megatron-core's GPTModel for one rank from a Hugging Face config, casts it and wraps it for gradients.

Letters: T packed tokens, s rows of them below the embedding, H hidden size, D depths of multi-token prediction, C
candidates per token, L = 1 + C labels per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from megatron_bridge.config import TrainerConfig
from megatron_bridge.device.device import DeviceEnv
from megatron_bridge.device.parallel import ParallelContext
from megatron_bridge.families.base import HFConfig
from megatron_bridge.families.registry import family_of
from megatron_bridge.model.biases import add_biases
from megatron_bridge.model.exact_modules import EXACT_MODULES, use_exact_functions
from megatron_bridge.model.local_modules import localize
from megatron_bridge.model.logprobs import label_logprobs
from megatron_bridge.model.lora import attach_adapters
from megatron_bridge.model.mtp import depth_states, mtp_block_spec, route_without_replay
from megatron_bridge.model.scalar_head import ScalarHead
from megatron_bridge.optim.optimizer import freeze
from megatron_bridge.plan.kernels import Spec
from megatron_bridge.plan.resolve import Resolved

assert hasattr(GPTModel, "_postprocess"), "GPTModel._postprocess is gone: PolicyModel overrides it"


class PolicyModel(GPTModel):
    """GPTModel whose last stage returns the labels' log-probabilities instead of a [T, V] tensor of logits, or the
    outputs of a scalar head."""

    def __init__(
        self,
        *args: Any,
        temperature: float,
        logprob_memory: int,
        exact: bool = False,
        scalar: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.scalar = scalar  # one number per token instead of the vocabulary
        if scalar and self.post_process:
            self.output_layer = ScalarHead(
                self.config.hidden_size,
                self.config.params_dtype,
                sequence_parallel=self.config.sequence_parallel,
                group=self.pg_collection.tp,
            )
        self.exact = exact  # compute log-probabilities with the embedded engine's operations
        self.spec: Spec = "local"  # module implementation; determines the parameters' names (te_names)
        self.temperature, self.logprob_memory = temperature, logprob_memory
        self.await_head: Callable[[], object] = lambda: None  # waits until the head is gathered: see connect_overlap

    def _postprocess(self, hidden_states: Tensor, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """On the last stage, given labels [1 + D + C, T] of `Shard` and loss_mask [1 + D, T] bool, returns fp32
        tensors that are 0 where a label has no loss: the label's log-probability [T], the entropy of its distribution
        [T], for each of D depths of multi-token prediction -log p of its label at temperature 1 [T], and with
        candidates their log-probabilities [T, C]. A scalar head returns its value [T] for each such row, and zeros.
        Without labels, or on another stage: what GPTModel returns."""
        labels, loss_mask = kwargs["labels"], kwargs["loss_mask"]
        if not self.post_process or labels is None:
            return super()._postprocess(hidden_states=hidden_states, **kwargs)  # type: ignore[no-any-return]
        if self.scalar:
            self.await_head()
            values = torch.where(loss_mask[0], self.output_layer(hidden_states), 0.0)
            return values, torch.zeros_like(values)
        depths = len(loss_mask)
        scored = torch.cat([labels[:1], labels[depths:]]) if len(labels) > depths else labels[:1]
        logprobs, entropy = self._logprobs(hidden_states, scored, loss_mask[0], self.temperature)
        out = [logprobs[:, 0], entropy]
        if self.mtp_process:
            names = ("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
            attention = {name: kwargs[name] for name in names}
            states = depth_states(self.mtp, hidden_states, labels, kwargs["position_ids"], self.embedding, **attention)
            for k, state in enumerate(states, 1):
                out.append(-self._logprobs(state, labels[k : k + 1], loss_mask[k], 1.0)[0][:, 0])
        return (*out, logprobs[:, 1:]) if len(scored) > 1 else tuple(out)

    def _logprobs(
        self, hidden_states: Tensor, labels: Tensor, loss_mask: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities [T, L] and entropy [T], fp32, of labels [L, T], 0 where a row has no loss; hidden_states
        [s, 1, H]."""
        group, tied = self.pg_collection.tp, self.share_embeddings_and_output_weights
        # backward sums the partial gradients of the vocabulary shards
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=group)
        else:
            hidden = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        rows = loss_mask.nonzero()[:, 0]
        self.await_head()
        logprobs, entropy = label_logprobs(
            hidden[:, 0].index_select(0, rows),
            self.shared_embedding_or_output_weight() if tied else self.output_layer.weight,
            labels.index_select(1, rows).t(),
            temperature=temperature,
            memory=self.logprob_memory,
            group=group,
            exact=self.exact,
        )
        n = labels.shape[1]
        blank, none = logprobs.new_zeros(n, logprobs.shape[1]), entropy.new_zeros(n)
        return blank.index_copy(0, rows, logprobs), none.index_copy(0, rows, entropy)


def _build_chunk(
    config: TrainerConfig,
    hf: HFConfig,
    tf: TransformerConfig,
    parallel: ParallelContext,
    env: DeviceEnv,
    stage: int,
    resolved: Resolved,
) -> PolicyModel:
    """Virtual stage `stage` of this rank (0 without virtual stages)."""
    family, vp_stage = family_of(hf), stage if config.parallel.vpp > 1 else None
    tensors = family.bind(hf)
    te, exact = resolved.spec == "te", resolved.forward == "exact"
    replacements = EXACT_MODULES if exact else None
    use_exact_functions(exact)
    spec = get_gpt_decoder_block_spec(tf, use_transformer_engine=te, normalization=tf.normalization, vp_stage=vp_stage)
    model = PolicyModel(
        tf,
        localize(spec, te=te, replacements=replacements),
        vocab_size=family.vocab_size(hf),
        max_sequence_length=hf.get("max_position_embeddings", 4096),
        pre_process=parallel.is_first_stage and stage == 0,
        post_process=parallel.is_last_stage and stage == config.parallel.vpp - 1,
        share_embeddings_and_output_weights=tensors.tied,
        position_embedding_type="rope",
        rotary_base=family.rotary_base(hf),
        rotary_percent=family.rotary_percent(hf),
        parallel_output=True,
        mtp_block_spec=mtp_block_spec(tf, spec, vp_stage, te=te, replacements=replacements),
        vp_stage=vp_stage,
        temperature=config.temperature,
        logprob_memory=config.logprob_memory_mib << 20,
        exact=exact,
        scalar=config.head == "scalar",
    )
    if model.mtp_process:
        route_without_replay(model.mtp)
    add_biases(model, tensors.biased)
    model.spec = resolved.spec
    _mark_divided(model)
    for name, param in model.named_parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(param)
        if ".experts." in name:
            # Experts have their own gradient buffer and optimizer at every ep, not only at ep > 1: otherwise the
            # optimizer's checkpoint cannot be read at another ep ("Expected 2 entries").
            param.allreduce = False
    placed: PolicyModel = model.to(env.device)
    return placed


def _mark_divided(model: torch.nn.Module) -> None:
    """Marks which weights tensor-parallel ranks hold parts of: the gradient's norm counts the others on the first rank.

    TransformerEngine 2.20 marks the weight of every Linear, also one that each rank holds whole, such as MLA's down
    projections, and no weight of a GroupedLinear, though ranks optimize different experts or different parts of them.
    """
    for name, module in model.named_modules():
        if ".experts." in name or getattr(module, "parallel_mode", "") is None:
            for weight in module.parameters(recurse=False):
                weight.tensor_model_parallel = ".experts." in name


def transformer_config(resolved: Resolved) -> TransformerConfig:
    """Megatron's TransformerConfig or MLATransformerConfig."""
    settings = resolved.transformer.copy()
    if resolved.forward == "batch invariant":  # megatron supports it only with flash attention
        settings |= {"batch_invariant_mode": True, "attention_backend": AttnBackend.flash}
    return (MLATransformerConfig if resolved.multi_latent_attention else TransformerConfig)(**settings)


def build_model(
    config: TrainerConfig, hf: HFConfig, resolved: Resolved, parallel: ParallelContext, env: DeviceEnv
) -> list[DistributedDataParallel]:
    """This rank's model chunks (one per virtual stage), randomly initialized and wrapped for gradient reduction.

    With params_dtype "bfloat16" all parameters except the router's bias are bf16; gradients accumulate in fp32. With
    `config.trains` false no parameter requires a gradient, so that there is no gradient buffer.
    """
    tf = transformer_config(resolved)
    models = [_build_chunk(config, hf, tf, parallel, env, stage, resolved) for stage in range(config.parallel.vpp)]
    freeze(models, config.optimizer.frozen, parallel)
    attach_adapters(models, config.lora, parallel, seed=config.seed)
    if not config.trains:
        for own in models:
            own.requires_grad_(False)
    chunks = []
    for stage, own in enumerate(models):
        model: torch.nn.Module = own
        if tf.bf16:
            model = Float16Module(tf, model)
            for router in every_router([model]):
                router._maintain_float32_expert_bias()
        # like megatron's own loop, later chunks are reduced as one bucket each, since their gradients come late
        ddp = DistributedDataParallelConfig(**resolved.ddp)
        chunks.append(DistributedDataParallel(tf, ddp, model, disable_bucketing=stage > 0))
    return chunks


def unwrap(chunk: torch.nn.Module) -> PolicyModel:
    """The model without its gradient and precision wrappers: parameter names without "module."."""
    while not isinstance(chunk, PolicyModel):
        chunk = chunk.module  # type: ignore[assignment]
    return chunk


def routers(chunks: list[Any]) -> list[TopKRouter]:
    """This rank's routers in layer order, excluding multi-token prediction; `layer_number - 1` is the global layer."""
    return [router for router in every_router(chunks) if router.layer_number <= router.config.num_layers]


def every_router(chunks: list[Any]) -> list[TopKRouter]:
    """All of this rank's routers; those of multi-token prediction come last."""
    return [m for chunk in chunks for m in chunk.modules() if isinstance(m, TopKRouter)]
