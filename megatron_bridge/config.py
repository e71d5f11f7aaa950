"""The trainer's sections of a run's configuration. Torch-free."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from miles_like.section import Section
from quant.spec import FOUR_BIT, QuantFormat, QuantSpec


class ParallelConfig(Section):
    """The layout. World size = tp * pp * cp * dp; expert parallelism uses the same ranks."""

    tp: int = Field(1, ge=1)  # tensor-parallel ranks: each has a slice of every matrix of attention and dense layers
    pp: int = Field(1, ge=1)  # pipeline-parallel stages: each has consecutive layers
    vpp: int = Field(1, ge=1)  # chunks of layers per stage of the interleaved schedule; 1: the plain 1F1B schedule
    cp: int = Field(1, ge=1)  # context-parallel ranks: each has a part of every sample's tokens
    ep: int = Field(1, ge=1)  # expert-parallel ranks: each has a share of every layer's experts
    etp: int = Field(1, ge=1)  # tensor-parallel ranks of an expert
    dp: int = Field(1, ge=1)  # data-parallel ranks: each has a share of a step's samples
    # layers of the first pipeline stage; None: as many as the others
    first_stage_layers: int | None = Field(None, ge=1)
    last_stage_layers: int | None = Field(None, ge=1)  # layers of the last pipeline stage; None: as many as the others
    # tensor-parallel ranks divide the tokens among them between attention and experts; tp > 1 can be trained only with
    # true
    sequence_parallel: bool = True

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.cp * self.dp

    @property
    def micro_multiple(self) -> int:
        """A rank's number of micro-batches must be a multiple of this: an interleaved schedule runs them in rounds."""
        return self.pp if self.vpp > 1 else 1

    @model_validator(mode="after")
    def expert_ranks_divide_the_world(self) -> ParallelConfig:
        ranks = self.tp * self.cp * self.dp
        if ranks % (self.ep * self.etp):
            raise ValueError(
                f"parallel.ep * parallel.etp = {self.ep * self.etp} does not divide tp * cp * dp = {ranks}: "
                "raise parallel.dp or lower parallel.ep"
            )
        return self


class PrecisionConfig(Section):
    """The storage format of the rollout's weights, and whether the trainer applies the same rounding."""

    format: QuantFormat = QuantFormat.FP8  # storage format of the rollout's weights
    # quantize every linear, or the routed experts only; None: the format's default
    scope: Literal["all", "experts"] | None = None
    block: tuple[int, int] | None = None  # rows and columns of a block that shares a scale; None: the format's default
    # naming scheme of the stored tensors; None: the checkpoint's, or the format's default
    convention: str | None = None
    qat: bool = False  # forward computes with decode(encode(weight)); the gradient passes to the weight unchanged
    # quantization of the inputs of quantized linears; fp8: e4m3 in groups of 128 columns of a token
    activations: Literal["none", "fp8"] = "none"
    allow_without_qat: bool = False  # allow 4-bit rollout weights although the trainer does not round

    @model_validator(mode="after")
    def every_key_does_something(self) -> PrecisionConfig:
        plain = self.format is QuantFormat.BF16
        given = {key: getattr(self, key) for key in ("scope", "block", "convention", "qat")}
        given["activations"] = self.activations != "none"
        if plain and (useless := [k for k, v in given.items() if v]):
            raise ValueError(f"precision.{useless[0]} has no effect with precision.format = 'bf16': remove it")
        if self.format in FOUR_BIT and not (self.qat or self.allow_without_qat):
            raise ValueError(
                f"precision.format = {self.format.value!r} without precision.qat: 4 bits change a weight by about 10 % "
                "and the trainer does not round; set precision.qat = true, or precision.allow_without_qat = true"
            )
        if self.activations == "fp8" and self.format not in (QuantFormat.FP8, QuantFormat.FP8_UE8M0, QuantFormat.MXFP8):
            raise ValueError(
                "precision.activations = 'fp8' requires FP8 weights, but precision.format = "
                f"{self.format.value!r}: set it to 'none'"
            )
        if not plain:
            self.spec()
        return self

    def spec(self) -> QuantSpec | None:
        """The rollout weights' spec; None for bf16. Raises ValueError for a block that the format does not support."""
        if self.format is QuantFormat.BF16:
            return None
        return QuantSpec.of(self.format, self.scope, block=self.block or (0, 0), convention=self.convention or "")


class OptimizerConfig(Section):
    """AdamW. Name patterns are shell patterns (`*`, `?`, `[...]`) over the parameter names of Megatron's local specs,
    with global layer and expert numbers, such as `decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight`."""

    lr: float = Field(1e-6, gt=0)  # peak learning rate
    # learning rate schedule after the warm-up; wsd: constant, then a linear decay
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    min_lr: float = Field(0.0, ge=0)  # the learning rate at the start of the warm-up and at the end of the decay
    warmup_steps: int = Field(0, ge=0)  # optimizer steps in which the learning rate rises linearly from min_lr to lr
    decay_steps: int | None = Field(None, ge=1)  # lr is min_lr from this step on; None: the steps of the run
    wsd_decay_steps: int | None = Field(None, ge=1)  # wsd: the number of steps before decay_steps that decay linearly
    weight_decay: float = Field(0.0, ge=0)  # decoupled weight decay, multiplied by the learning rate
    no_decay: tuple[str, ...] = ()  # name patterns not decayed, in addition to all one-dimensional parameters
    frozen: tuple[str, ...] = ()  # name patterns of parameters and routing biases that are not trained
    beta1: float = Field(0.9, ge=0, lt=1)  # decay rate of the mean of gradients
    beta2: float = Field(0.95, ge=0, lt=1)  # decay rate of the mean of squared gradients
    eps: float = Field(1e-8, gt=0)  # added to the root of the mean of squared gradients
    # largest norm of the gradient of all parameters; a larger gradient is scaled down to it
    clip_grad: float = Field(1.0, gt=0)

    @model_validator(mode="after")
    def schedule_makes_sense(self) -> OptimizerConfig:
        decays, warm, ends = self.schedule != "constant", self.warmup_steps, self.decay_steps
        if self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr = {self.min_lr} is above optimizer.lr = {self.lr}: lower it")
        if self.min_lr and not decays and not warm:
            raise ValueError(
                f"optimizer.min_lr = {self.min_lr} has no effect with schedule = 'constant' and warmup_steps = 0: "
                "remove it or set a schedule"
            )
        if ends is not None and not decays:
            raise ValueError(
                f"optimizer.decay_steps = {ends} has no effect with schedule = 'constant': remove it or set a schedule"
            )
        if (self.wsd_decay_steps is not None) != (self.schedule == "wsd"):
            raise ValueError(
                f"optimizer.schedule = {self.schedule!r} with wsd_decay_steps = {self.wsd_decay_steps}: schedule "
                "'wsd' requires wsd_decay_steps, and other schedules do not use it: set or remove it"
            )
        if ends is not None and warm + (self.wsd_decay_steps or 1) > ends:
            raise ValueError(
                f"optimizer.warmup_steps = {warm} and {self.wsd_decay_steps or 1} steps of decay do not fit into "
                f"decay_steps = {ends}: lower warmup_steps or raise decay_steps"
            )
        return self

    def over(self, steps: int) -> OptimizerConfig:
        """A copy with decay_steps set for a run of `steps` steps. Raises ValueError when the schedule does not fit."""
        if self.schedule == "constant" or self.decay_steps is not None:
            return self
        return OptimizerConfig.model_validate(self.model_dump() | {"decay_steps": max(steps, 1)})


class LoraConfig(Section):
    """Low-rank adapters: only they are trained; they are merged into the published weights."""

    rank: int = Field(0, ge=0)  # rank of the adapters; 0: no adapters, all weights are trained
    alpha: float = Field(16.0, gt=0)  # the adapters' product is scaled by alpha / rank
    # modules with adapters; mlp: of dense layers
    targets: tuple[Literal["attention", "experts", "shared_experts", "mlp"], ...] = ("attention",)

    @model_validator(mode="after")
    def every_key_does_something(self) -> LoraConfig:
        defaults = type(self).model_fields
        for key in ("alpha", "targets"):
            if not self.rank and getattr(self, key) != defaults[key].default:
                raise ValueError(f"lora.{key} = {getattr(self, key)} has no effect with lora.rank = 0: set lora.rank")
        if self.rank and not self.targets:
            raise ValueError(
                f"lora.rank = {self.rank} with no lora.targets trains nothing: add targets, or set lora.rank = 0"
            )
        return self


class ReplayConfig(Section):
    """Which experts training uses. Agreement with the rollout's routes is measured in every mode."""

    # r3: the experts that the rollout used; r2: those that the trainer's routers choose in an old-log-prob pass before
    # a rollout's first optimizer step; off: the routers' current choice
    mode: Literal["r3", "r2", "off"] = "r3"
    # a diagnostic: also replay the weights of the experts' outputs. They are then constants: the routers get no
    # gradient except that of an auxiliary loss
    gates: bool = False

    @model_validator(mode="after")
    def gates_are_replayed(self) -> ReplayConfig:
        if self.gates and self.mode == "off":
            raise ValueError(
                "replay.gates = true has no effect with replay.mode = 'off': set mode = 'r2' or gates = false"
            )
        return self


class AgreementConfig(Section):
    """Minimum shares of the replayed experts that the trainer's own routers must choose too, checked in every step with
    `replay.mode = "r3"` before its optimizer step (routing_check.py)."""

    overall: float = Field(0.0, ge=0, le=1)  # over all layers; 0: not checked
    layer: float | None = Field(0.0, ge=0, le=1)  # of each layer; 0: not checked; None: derived from `explained`
    # minimum agreement that the precision of both sides explains, as Cohen's kappa: 0 for chance, 1 for equality
    explained: float = Field(1.0, ge=0, le=1)


class KernelsConfig(Section):
    """Module implementation, precision of the linears, and overlaps. The defaults work on any device."""

    spec: Literal["auto", "local", "te"] = "auto"  # auto: TransformerEngine (te) if CUDA and the package are available
    fp8: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = "none"  # FP8 recipe of the linears
    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"  # number format; hybrid: gradients in e5m2
    fp8_param_gather: bool = False  # store and gather weights in FP8
    grouped_gemm: bool = False  # compute a rank's experts in one kernel launch
    # how tokens are sent to the ranks of their experts: all-to-all, all-gather, or flex_backend
    dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    flex_backend: Literal["deepep", "hybridep"] = "deepep"  # library for dispatcher = "flex"
    overlap_grad_reduce: bool = False  # reduce gradients while backward runs
    overlap_param_gather: bool = False  # gather updated weights while the next forward runs
    overlap_shared_expert: bool = False  # compute the shared expert while tokens are dispatched
    offload_optimizer: float = Field(0.0, ge=0, le=1)  # share of the optimizer's state and step that is on the host
    # compute SwiGLU in one autograd function, which saves fewer tensors; experts of local modules always do
    swiglu_fusion: bool = True
    rope_fusion: bool = False  # compute rotary embeddings in one kernel
    permute_fusion: bool = False  # sort tokens by expert, and back, in one kernel each


class RecomputeConfig(Section):
    """Activations that are recomputed in backward: none, of whole layers, or of some modules of each layer."""

    # activation recomputation; selective: recompute_modules; full: whole layers
    recompute: Literal["none", "selective", "full"] = "none"
    recompute_modules: tuple[str, ...] = ()  # modules under megatron's names, for "selective"; empty: a default list

    @model_validator(mode="after")
    def modules_are_chosen_selectively(self) -> RecomputeConfig:
        if self.recompute_modules and self.recompute != "selective":
            raise ValueError(
                f"recompute_modules = {list(self.recompute_modules)} has no effect with recompute = "
                f"{self.recompute!r}: set recompute = 'selective' or remove it"
            )
        return self


class TrainerConfig(RecomputeConfig):
    """The complete configuration of one trainer rank.

    router_aux_loss: coefficient c of the routers' load-balancing loss. In each MoE layer it adds
    c * (sum over micro-batches of T L) / loss_tokens to the loss of a step, where T is the number of tokens of the
    micro-batch, prompts included, and L = E / (K T^2) sum_i n_i sum_x p_i(x) (router.py defines the letters) is 1 for
    evenly spread load and scores. So every token, with or without loss, contributes c * L. L is computed per
    micro-batch: unlike the rest of the loss it depends on how samples are packed. It counts the router's own choices,
    with or without replay.
    """

    hf_config: str  # directory holding config.json
    parallel: ParallelConfig
    precision: PrecisionConfig
    optimizer: OptimizerConfig
    replay: ReplayConfig
    agreement: AgreementConfig = AgreementConfig()
    kernels: KernelsConfig = KernelsConfig()
    lora: LoraConfig = LoraConfig()
    seed: int = 0
    trains: bool = True  # False: forward passes only, without gradient buffers and optimizer
    temperature: float = Field(1.0, gt=0)  # the rollout's: log-probs are of logits / temperature
    router_bias_update_rate: float = Field(0.0, ge=0)  # 0 freezes e_score_correction_bias
    router_aux_loss: float = Field(0.0, ge=0)
    params_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    distributed_optimizer: bool = True
    reference: bool = False  # keep the weights that `load_weights` reads
    reference_for_loss: bool = True  # pass the reference's log-probs to the loss: one more forward pass per step
    reference_every: int = Field(0, ge=0)  # rollouts between updates of the reference to the trained weights; 0: never
    # the vocabulary, or one number per token (`score.weight`, as in transformers' ...ForSequenceClassification), which
    # the loss function then gets as `logprobs`: a critic's values, a reward model's scores
    head: Literal["lm", "scalar"] = "lm"
    mtp_coefficient: float = Field(0.0, ge=0)  # of the multi-token prediction loss; 0: its modules are not built
    logprob_memory_mib: int = Field(64, ge=1)  # limit on the logits and their temporaries, MiB
    on_nonfinite: Literal["stop", "skip"] = "stop"  # for a step whose loss or gradient norm is nan or infinite
    deterministic: bool = False  # forward with the embedded engine's operations; on CUDA, megatron's settings for it

    @model_validator(mode="after")
    def schedule_has_an_end(self) -> TrainerConfig:
        if self.optimizer.schedule != "constant" and self.optimizer.decay_steps is None:
            raise ValueError(
                f"optimizer.schedule = {self.optimizer.schedule!r} without decay_steps: the trainer does not know the "
                "length of the run; set optimizer.decay_steps"
            )
        return self

    @model_validator(mode="after")
    def a_reference_moves(self) -> TrainerConfig:
        if self.reference_every and not self.reference:
            raise ValueError(
                f"reference_every = {self.reference_every} has no effect, since nothing needs a reference: set it to 0"
            )
        return self

    @model_validator(mode="after")
    def a_scalar_head_predicts_no_token(self) -> TrainerConfig:
        if self.head == "scalar" and self.mtp_coefficient:
            raise ValueError(
                f"mtp_coefficient = {self.mtp_coefficient} with head = 'scalar', which predicts no tokens: set it to 0"
            )
        if self.head == "scalar" and self.lora.rank:
            raise ValueError(
                f"lora.rank = {self.lora.rank} with head = 'scalar' would freeze the new head: set lora.rank = 0"
            )
        return self

    @model_validator(mode="after")
    def only_adapters_train(self) -> TrainerConfig:
        if self.lora.rank and self.optimizer.frozen:
            raise ValueError(
                f"lora.rank = {self.lora.rank} freezes everything except its adapters, so optimizer.frozen = "
                f"{list(self.optimizer.frozen)} could only freeze adapters: remove it, or narrow lora.targets"
            )
        if self.lora.rank and self.router_bias_update_rate:
            raise ValueError(
                f"lora.rank = {self.lora.rank} freezes the routers, but router_bias_update_rate = "
                f"{self.router_bias_update_rate}: set it to 0"
            )
        return self
