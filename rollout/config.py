"""The configuration sections of the rollout. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from miles_like.section import Section
from miles_like.variables import read_variables
from rollout.tool_config import AgentConfig, ToolConfig

# the attention backends of SGLang 0.5.23 for NVIDIA GPUs that have deterministic kernels
DETERMINISTIC_ATTENTION = ("fa3", "fa4", "flashinfer", "triton")
VLLM_VERSION = "0.32.0"  # its endpoints change between versions


class SGLangFlags(Section):
    """Flags of a stock SGLang server that this project sets, under SGLang's names with underscores."""

    # not a server flag: path of the Python interpreter of SGLang's virtual environment; None: the trainer's
    python: str | None = None
    tp_size: int = Field(1, ge=1)  # GPUs of a server, over which tensor parallelism divides the model
    ep_size: int = Field(1, ge=1)  # expert-parallel ranks among them; 1: experts are divided by tensor parallelism
    dp_size: int = Field(1, ge=1)  # data-parallel replicas; with enable_dp_attention, of attention only
    # data-parallel attention: each replica caches keys and values of its requests only
    enable_dp_attention: bool = False
    moe_dense_tp_size: Literal[1] | None = None  # TP size of the MLP in layers without experts; None: tp_size
    moe_a2a_backend: Literal["none", "deepep"] = "none"  # how tokens are sent to the ranks of their experts
    # DeepEP's kernels: normal for prefill, low_latency for decode; auto: both
    deepep_mode: Literal["auto", "normal", "low_latency"] = "auto"
    mem_fraction_static: float = Field(0.8, gt=0, lt=1)  # share of a GPU's memory for weights and KV cache
    kv_cache_dtype: str = "auto"  # for example fp8_e4m3; auto: the model's dtype
    chunked_prefill_size: int | None = None  # largest number of tokens in a prefill chunk; None: SGLang's default
    max_running_requests: int | None = None  # largest number of samples generated at once; None: SGLang's default
    context_length: int | None = None  # largest number of tokens of prompt and response; None: the model's
    attention_backend: str | None = None  # for example fa3, flashinfer or triton; None: SGLang's default
    enable_memory_saver: bool | None = None  # make memory releasable; None: if trainer and servers take turns
    enable_deterministic_inference: bool = False  # compute log-probabilities that do not depend on the batch
    # port at which server 0's ranks meet; server i uses this port + 64 i and the 13 ports after it. None: 20000, or
    # lower if the kernel uses 20000 for outgoing connections
    dist_init_port: int | None = Field(None, ge=1, le=65535 - 64)
    # not a server flag: GPU generation, which decides which weight formats can be served
    gpu: Literal["hopper", "blackwell"] = "hopper"

    @model_validator(mode="after")
    def the_interpreter_is_a_path(self) -> SGLangFlags:
        _check_interpreter("sglang", self.python)
        return self

    @model_validator(mode="after")
    def attention_is_deterministic(self) -> SGLangFlags:
        own = self.attention_backend
        if self.enable_deterministic_inference and own not in (None, *DETERMINISTIC_ATTENTION):
            raise ValueError(
                f"rollout.sglang.attention_backend = {own!r} has no deterministic kernels: set it to one of "
                f"{', '.join(DETERMINISTIC_ATTENTION)}, or enable_deterministic_inference = false"
            )
        return self


class VLLMFlags(Section):
    """Flags of a stock vLLM server that this project sets, under vLLM's names with underscores."""

    # not a server flag: path of the Python interpreter of vLLM's virtual environment; None: the trainer's
    python: str | None = None
    tensor_parallel_size: int = Field(1, ge=1)  # GPUs of a server, over which tensor parallelism divides the model
    enable_expert_parallel: bool = False  # whole experts on each of these ranks instead of a part of every expert
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # dtype of weights and activations; auto: the checkpoint's
    # share of a GPU's memory for weights and KV cache; on CPUs, of the host's memory
    gpu_memory_utilization: float = Field(0.8, gt=0, lt=1)
    kv_cache_dtype: Literal["auto", "bfloat16"] = "auto"  # dtype of the KV cache; auto: the model's
    max_model_len: int | None = Field(None, ge=8)  # most tokens of a prompt and its response; None: the model's
    max_num_seqs: int | None = Field(None, ge=1)  # largest number of samples generated at once; None: vLLM's default
    # largest number of candidates per position that a teacher returns; None: vLLM's default, 20
    max_logprobs: int | None = Field(None, ge=1)
    enforce_eager: bool = False  # disable CUDA graphs and compilation

    @model_validator(mode="after")
    def the_interpreter_is_a_path(self) -> VLLMFlags:
        _check_interpreter("vllm", self.python)
        return self


def _check_interpreter(engine: str, python: str | None) -> None:
    if python is not None and not python.startswith("/"):
        raise ValueError(
            f"rollout.{engine}.python = {python!r} must be the path of a Python interpreter, the same on every "
            "node: use an absolute path, or a path starting with ./ that is relative to the configuration file"
        )


class EmbeddedFlags(Section):
    """The engine of this project."""

    # where a server computes. "cuda": on one GPU of the rollout, in bfloat16
    device: Literal["cpu", "cuda"] = "cpu"
    # dtype of activations; weights are the decoded codes. None: float32, or bfloat16 on "cuda" and with
    # alignment.deterministic
    dtype: Literal["float32", "bfloat16"] | None = None
    # "decoded": keep decoded copies beside the codes. "codes": keep the codes only, which takes less memory
    weights: Literal["decoded", "codes"] = "decoded"
    threads: int = Field(2, ge=1)  # torch threads of each server rank
    tp_size: int = Field(1, ge=1)  # tensor-parallel ranks (processes) of a server
    ep_size: int = Field(1, ge=1)  # expert-parallel groups of these ranks; 1: every expert is divided over all ranks
    max_running_requests: int = Field(512, ge=1)  # largest number of samples generated at once
    max_total_tokens: int = Field(65536, ge=64)  # slots in the KV cache
    context_length: int = Field(1024, ge=8)  # largest number of tokens of prompt and response
    # do not reuse the cached keys and values of prompt prefixes. None: reuse them only with alignment.deterministic,
    # where it changes no bit
    disable_radix_cache: bool | None = None
    return_gates: bool = False  # return the experts' gate weights with the routes, for replay.gates

    @model_validator(mode="after")
    def a_gpu_can_do_it(self) -> EmbeddedFlags:
        if self.device == "cpu":
            return self
        if self.dtype == "float32":
            raise ValueError(
                "rollout.embedded.device = 'cuda' computes in bfloat16, but rollout.embedded.dtype = 'float32': remove "
                "that key, or set device = 'cpu'"
            )
        if (ranks := max(self.tp_size, self.ep_size)) > 1:
            raise ValueError(
                f"rollout.embedded.device = 'cuda' is for servers of one rank, but tp_size, ep_size = {self.tp_size}, "
                f"{self.ep_size} need {ranks}: set both to 1 and raise rollout.servers, or set device = 'cpu'"
            )
        return self


class RolloutConfig(Section):
    # this project's own engine, stock SGLang, or stock vLLM (docs/vllm.md)
    engine: Literal["embedded", "sglang", "vllm"] = "embedded"
    servers: int = Field(1, ge=1)  # number of servers
    # processes that sample, score and hold the samples' tokens, log-probs and routes until ranks train them; 0: the
    # driver does. None: 0 on one node and for a reward that Python code passes, else one for each node with servers
    workers: int | None = Field(None, ge=0)
    # seconds without a sign of life after which such a process is replaced, and its samples are sampled again
    worker_timeout_s: float = Field(600.0, gt=0)
    # bytes of such values held by all workers, from which no further prompts are admitted before a step is trained
    # (not with buffer.lockstep, which holds a fixed number of steps)
    held_bytes: int = Field(256 << 30, ge=1)
    max_new_tokens: int = Field(64, ge=1)  # tokens of a response, or of one turn of an episode
    temperature: float = Field(1.0, gt=0)  # sampling temperature; the trainer computes log-probabilities at it too
    top_p: float = Field(1.0, gt=0, le=1)  # nucleus sampling; 1: off
    top_k: int = -1  # sample among the k most likely tokens; -1: among all
    # limit on the prompts sampled for one step, in units of groups_per_step; more than 1 replaces discarded groups
    max_rounds: int = Field(10, ge=1)
    prompts_per_request: int = Field(16, ge=1)  # prompts in one HTTP request
    # time limit of a server's start, without the phases that have their own limit
    start_timeout_s: float = Field(120.0, gt=0)
    load_timeout_s: float | None = Field(None, gt=0)  # time limit of loading weights; None: included in start_timeout_s
    # time limit from loaded weights to the first answer: kernels, graphs, warm-up; None: included in start_timeout_s
    warmup_timeout_s: float | None = Field(None, gt=0)
    request_timeout_s: float = Field(120.0, gt=0)  # time limit of one HTTP request
    # restarts of one server within restart_window_s, after which it is retired: because it died, hangs, or does not
    # compute with the published weights even after a second publication. No server is restarted if servers and trainer
    # take turns
    restarts: int = Field(3, ge=0)
    restart_window_s: float = Field(3600.0, gt=0)  # seconds in which restarts are counted
    # the run ends when fewer servers are left that are not retired; with restarts = 0 and min_servers = servers it ends
    # with the first server that fails
    min_servers: int = Field(1, ge=1)
    health_every_s: float = Field(5.0, gt=0)  # seconds between two requests to a server's /health
    # a server whose /health is not answered for so many seconds hangs, and is ended
    health_timeout_s: float = Field(30.0, gt=0)
    # port of server 0; server i uses port + i. None: any free port; for stock servers of a run 30000, or lower if the
    # kernel uses 30000 for outgoing connections
    port: int | None = Field(None, ge=1, le=65535)
    environment: str | None = None  # import path (docs/extending.md) of an environment for episodes of several turns
    generate: str | None = None  # import path of a function that generates the samples of a prompt
    # how messages of an environment become tokens (docs/tools.md). "template": by the tokenizer's chat template; a name
    # of the library renderers: by that; "auto": by the library where it writes what the template does, else "template".
    # None: "auto" with `tools`; an environment answers with text
    renderer: str | None = None
    # largest number of policy turns in an episode, each of up to max_new_tokens
    max_turns: int | None = Field(None, ge=1)
    # token limit after the prompt, environment's tokens included; None: max_new_tokens
    max_episode_tokens: int | None = Field(None, ge=1)
    # time limit of an answer of `environment`, or of a prompt in `generate`, which ends the run
    call_timeout_s: float = Field(1800.0, gt=0)
    # time limit of an answer of `environment` that discards the episode instead of ending the run; None: call_timeout_s
    environment_timeout_s: float | None = Field(None, gt=0)
    # seconds from the end of its first turn after which an episode is discarded; None: no limit
    episode_timeout_s: float | None = Field(None, gt=0)
    # environments without async that are called at once, each in a thread; they must not share state
    environment_threads: int = Field(1, ge=1)
    tools: ToolConfig = ToolConfig()
    agent: AgentConfig = AgentConfig()
    embedded: EmbeddedFlags = EmbeddedFlags()
    sglang: SGLangFlags = SGLangFlags()
    vllm: VLLMFlags = VLLMFlags()
    env: dict[str, str] = Field(
        {}
    )  # environment variables of the servers; "" takes a secret from the driver's environment

    @field_validator("env", mode="before")
    @classmethod
    def variables_can_be_set(cls, given: Any) -> Any:
        return read_variables("rollout.env", given)

    @property
    def loses_servers(self) -> bool:
        """Whether a run without turns goes on when a server fails."""
        return self.restarts > 0 or self.min_servers < self.servers

    @property
    def has_episode_runner(self) -> bool:
        """Whether an environment or a generate function makes the samples. It may also set their rewards."""
        return bool(self.turns_with or self.plays_itself)

    @property
    def plays_itself(self) -> bool:
        """Whether a function or an agent makes the samples by its own calls, so that none goes on after a resume."""
        return bool(self.generate or self.agent.given)

    @property
    def turns_with(self) -> str | None:
        """The key of what the policy takes turns with; None: it answers once, or a generate function runs its turns."""
        if self.environment is not None:
            return f"rollout.environment = {self.environment!r}"
        return "rollout.tools" if self.tools.given else None

    @property
    def episode_key(self) -> str:
        """The key of what makes the samples."""
        return (self.turns_with or ("rollout.agent" if self.agent.given else "rollout.generate")).split(" ")[0]

    @property
    def turns(self) -> int:
        """The largest number of turns of the policy in an episode; 1 without an environment."""
        return self.max_turns or 1

    @property
    def longest_answer(self) -> int:
        """The largest number of tokens that can follow a prompt."""
        return self.max_episode_tokens or self.max_new_tokens

    @property
    def served_tokens(self) -> int | None:
        """The largest number of tokens of a prompt and its response on a server; None: the model's."""
        return {
            "embedded": self.embedded.context_length,
            "sglang": self.sglang.context_length,
            "vllm": self.vllm.max_model_len,
        }[self.engine]

    @property
    def python(self) -> str | None:
        """The Python of the servers' virtual environment; None: the trainer's."""
        return {"embedded": None, "sglang": self.sglang.python, "vllm": self.vllm.python}[self.engine]

    @property
    def on_gpus(self) -> bool:
        """Whether servers compute on GPUs in a run that has any."""
        return self.engine != "embedded" or self.embedded.device == "cuda"

    @property
    def gpus_per_server(self) -> int:
        """Where servers compute on GPUs."""
        return {"embedded": 1, "sglang": self.sglang.tp_size, "vllm": self.vllm.tensor_parallel_size}[self.engine]

    @model_validator(mode="after")
    def enough_servers_are_started(self) -> RolloutConfig:
        if self.min_servers > self.servers:
            raise ValueError(
                f"rollout.min_servers = {self.min_servers} of rollout.servers = {self.servers}: lower the former or "
                "raise the latter"
            )
        return self

    @model_validator(mode="after")
    def the_engine_s_interpreter_is_used(self) -> RolloutConfig:
        for engine, python in (("sglang", self.sglang.python), ("vllm", self.vllm.python)):
            if python is None or self.engine == engine:
                continue
            runs = ", which the trainer's own Python runs" if self.engine == "embedded" else ""
            raise ValueError(
                f"rollout.{engine}.python = {python!r} has no effect with rollout.engine = {self.engine!r}{runs}: "
                f"remove it, or set rollout.engine = {engine!r}"
            )
        return self

    @model_validator(mode="after")
    def log_probs_of_vllm_are_of_the_whole_vocabulary(self) -> RolloutConfig:
        if self.engine == "vllm" and (self.top_k != -1 or self.top_p != 1.0):
            raise ValueError(
                f"rollout.top_k = {self.top_k} and rollout.top_p = {self.top_p:g}: a vLLM server reports "
                "log-probabilities after both filters, but the trainer computes them over the whole vocabulary: "
                "set top_k = -1 and top_p = 1, or rollout.engine = 'sglang'"
            )
        return self

    @model_validator(mode="after")
    def log_probs_are_at_the_temperature(self) -> RolloutConfig:
        """SGLang reports the log-probabilities of a greedy request at temperature 1, whatever `temperature` is."""
        if self.top_k < 1 and self.top_k != -1:
            raise ValueError(f"rollout.top_k = {self.top_k}: set it to -1 for the whole vocabulary, or to at least 1")
        if self.temperature < 1e-6 or (self.top_k == 1 and self.temperature != 1):
            raise ValueError(
                f"rollout.temperature = {self.temperature:g} with rollout.top_k = {self.top_k} is greedy: the "
                "engine reports greedy log-probabilities at temperature 1, but the trainer computes them at "
                f"{self.temperature:g}; set top_k = 1 and temperature = 1 for greedy samples"
            )
        return self

    @model_validator(mode="after")
    def episodes_have_limits(self) -> RolloutConfig:
        if self.environment and self.tools.given:
            raise ValueError(
                f"rollout.environment = {self.environment!r} and rollout.tools: an environment calls its own tools; "
                "remove one of the two"
            )
        if self.turns_with and self.generate:
            raise ValueError(
                f"{self.turns_with} and rollout.generate = {self.generate!r}: a generate function runs its own turns; "
                "remove one of the two"
            )
        if self.agent.given and (
            other := self.turns_with or (self.generate and f"rollout.generate = {self.generate!r}")
        ):
            raise ValueError(f"rollout.agent and {other}: an agent plays its own turns; remove one of the two")
        if self.agent.given and self.max_episode_tokens is None:
            raise ValueError("rollout.agent needs rollout.max_episode_tokens: set it")
        if self.renderer is not None and not (self.turns_with or self.agent.given):
            raise ValueError(
                f"rollout.renderer = {self.renderer!r} has no effect without rollout.environment, rollout.tools or "
                "rollout.agent: remove it"
            )
        limits = {"max_turns": self.max_turns, "max_episode_tokens": self.max_episode_tokens}
        for key, value in limits.items():
            if self.turns_with and value is None:
                raise ValueError(f"{self.turns_with} needs rollout.{key}: set it")
            if value is not None and not (self.turns_with or (self.plays_itself and key == "max_episode_tokens")):
                raise ValueError(
                    f"rollout.{key} = {value} has no effect without rollout.environment or rollout.tools: remove it"
                )
        for key in ("environment_timeout_s", "episode_timeout_s"):
            if (seconds := getattr(self, key)) is not None and not self.turns_with:
                raise ValueError(
                    f"rollout.{key} = {seconds:g} has no effect without rollout.environment or rollout.tools: remove "
                    "it; rollout.call_timeout_s limits a generate function"
                )
        if self.environment_threads > 1 and self.environment is None:
            raise ValueError(
                f"rollout.environment_threads = {self.environment_threads} has no effect without rollout.environment: "
                "remove it"
            )
        if self.max_episode_tokens is not None and self.max_episode_tokens < self.max_new_tokens:
            raise ValueError(
                f"rollout.max_episode_tokens = {self.max_episode_tokens} is less than rollout.max_new_tokens = "
                f"{self.max_new_tokens}, the limit of one turn: raise the former or lower the latter"
            )
        return self


class PublishConfig(Section):
    # how weights are sent to the servers. tensor: servers on the host of trainer rank 0 open its host or GPU memory,
    # other servers get them in requests; distributed: by broadcasts to all ranks of all servers, over NCCL between GPUs
    # and gloo otherwise; disk: as a checkpoint on a shared disk; delta: as differences from the version that the
    # servers hold, on a shared disk, embedded engine only; reshard: from each trainer rank to the server ranks that
    # need its weights, without a gather, over gloo, embedded engine only
    path: Literal["tensor", "distributed", "disk", "delta", "reshard"] = "tensor"
    # largest number of trainer ranks that send with path = "distributed", each in a process group with all server
    # ranks: one per expert-parallel rank of each pipeline stage if these are not more, else one per stage
    sources: int = Field(8, ge=1)
    # the trainer's ranks write a version into the run directory, and train the next step, whose samples are already in
    # the buffer (needs buffer.max_staleness >= 1), while the servers load it from there (path = "disk", "delta") or the
    # driver sends it (path = "tensor", "distributed"); False: the next step begins when they serve the version
    during_training: bool = False
    # what happens to running samples: abort and continue them in another request, prefill them again after the pause
    # (retract), or freeze them
    pause_mode: Literal["abort", "retract", "in_place"] = "retract"
    bucket_bytes: int = Field(256 << 20, ge=1)  # bytes of tensors sent at once; the sender holds three such buckets
    # how long rank 0 waits for other trainer ranks: with path = "disk", until they have written their parts; with
    # "distributed", beyond rollout.request_timeout_s, until they have a bucket to send. Must be less than
    # cluster.timeout_s, which limits the whole publication
    parts_timeout_s: float = Field(900.0, gt=0)
    # bytes of tensors that are encoded before the servers are paused, which bounds the sender's memory
    hold_bytes: int = Field(2 << 30, ge=1)
    verify: bool = True  # compare the servers' checksums after every publication
    # tokens of a text that every server scores after every publication, compared with the trainer's log-probs; 0: no
    # text
    answer_tokens: int = Field(256, ge=0)

    def check(self, *, engine: str, ranks: int, takes_turns: bool, gpus: bool = False) -> None:
        """Raises ValueError where the servers cannot take weights by this path. ranks: of an embedded server;
        takes_turns: servers release their weights while the trainer computes; gpus: the cluster has GPUs."""
        if self.path == "reshard" and engine != "embedded":
            raise ValueError(
                f"publish.path = 'reshard' with rollout.engine = {engine!r}, whose ranks cannot receive slices of "
                "weights: set publish.path = 'distributed' or 'disk', or rollout.engine = 'embedded'"
            )
        if self.path == "distributed" and takes_turns and gpus and engine != "embedded":
            raise ValueError(
                "publish.path = 'distributed', but the servers use GPUs of trainer ranks (cluster.colocate), and "
                "an NCCL group allows one member per GPU: set publish.path = 'tensor' or 'disk', or "
                "cluster.colocate = false"
            )
        if self.path != "delta":
            return
        if engine != "embedded":
            raise ValueError(
                f"publish.path = 'delta' with rollout.engine = {engine!r}, whose servers cannot read weight "
                "differences: set publish.path = 'disk', or rollout.engine = 'embedded'"
            )
        if ranks > 1:
            raise ValueError(
                f"publish.path = 'delta' with rollout.embedded.tp_size = {ranks}, whose ranks hold slices, to "
                "which weight differences cannot be applied: set publish.path = 'disk' or 'tensor', or tp_size = "
                "1"
            )
        if takes_turns:
            raise ValueError(
                "publish.path = 'delta', but the servers release their weights while the trainer computes "
                "(cluster.colocate = true), and a weight difference needs the previous weights: set publish.path "
                "= 'tensor' or 'disk', or cluster.colocate = false"
            )

    def check_during_training(self, takes_turns: bool, slack: int, teachers: Sequence[str], nccl: bool) -> None:
        """Raises ValueError where servers cannot load beside training. slack: weight versions between a sample and its
        training, at most; teachers: those that are the policy on the rollout's servers; nccl: groups with the servers'
        ranks are of GPUs."""
        if not self.during_training:
            return
        if self.path == "reshard" or (self.path == "distributed" and nccl):
            raise ValueError(
                f"publish.during_training = true with publish.path = {self.path!r}, which sends from the trainer's own "
                "memory until the servers have the weights: set publish.path = 'disk', or publish.during_training "
                "= false"
            )
        if takes_turns:
            raise ValueError(
                "publish.during_training = true, but the servers release their weights while the trainer computes "
                "(cluster.colocate = true): set publish.during_training = false, or cluster.colocate = false"
            )
        if not slack:
            raise ValueError(
                "publish.during_training = true with buffer.max_staleness = 0, where each step trains on samples "
                "of the last published version: set buffer.max_staleness = 1, or publish.during_training = false"
            )
        if teachers:
            raise ValueError(
                f"publish.during_training = true with distillation.teachers.{teachers[0]}, which is scored by the "
                "rollout servers, even while they load a version: set its weights = 'reference', or "
                "publish.during_training = false"
            )
