"""`verify`: starts trainer and servers on a job's checkpoint, scores the same samples on both and attributes the gap.

`train` makes a short form of this comparison with its own ranks and servers before its first step.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from miles_like.alignment.live import LiveRollout, Published, opaque_evidence, stacked_evidence, weight_evidence
from miles_like.alignment.report import Report
from miles_like.alignment.weights import WeightEvidence
from miles_like.checkpoint import run_state
from miles_like.cluster.factories import CheckpointWriter
from miles_like.cluster.trainer_ranks import RayTrainer
from miles_like.limits.regular_files import json_lines, parse_json, read_text
from miles_like.protocols import TrainerRanks
from miles_like.run.alignment import check_bits, comparison, drill_down
from miles_like.run.setup.launcher import Launcher
from miles_like.run.setup.model_plan import ModelPlan, run_algorithm
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.turn_taking import TurnTaking, release_servers
from miles_like.stopping import run_to_end
from miles_like.types import Finish, Prompt, Sample, SampleGroup, VersionSpan
from quant.hf_config import quantized_config
from rollout.prompts.mix import PromptSource
from rollout.server_key import ServerKey
from rollout.sglang.client import ServerClient, SGLangClient
from rollout.wire.control import ModelInfo

PROMPTS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """Inputs that replace those that a comparison would start or sample itself."""

    rollouts: Path | None = None  # a file of samples that a run wrote; no server is started then
    checkpoint: Path | None = None  # a step_N folder of a run, in place of the run's initial weights
    attached: Sequence[str] = ()  # URLs of running servers
    key: ServerKey | None = None  # of those servers
    overwrite: bool = False  # the trainer's weights may be published to them, after their weights were hashed
    layers: bool = False  # compare the residual stream at every layer too
    prompts: int | None = None  # number of prompts to sample; None: PROMPTS

    def of_run(self, run_dir: Path) -> VerifyOptions:
        """With the last checkpoint in `run_dir`, where new samples of servers that are started are to be compared and
        no checkpoint is given."""
        if self.checkpoint is not None or self.rollouts is not None or self.attached:
            return self
        return replace(self, checkpoint=run_state.latest_folder(run_dir / "checkpoints"))


class VerifyRun:
    """One comparison of trainer and rollout."""

    def __init__(self, rollout: RolloutSide, options: VerifyOptions, *, launcher: Launcher | None = None) -> None:
        """Raises ValueError for an incomplete checkpoint, for `rollouts` together with `attached`, `layers` or
        `prompts`, and for `overwrite` without `attached`."""
        rollouts, checkpoint = options.rollouts, options.checkpoint
        attached, prompts = options.attached, options.prompts
        if attached and rollouts is not None:
            raise ValueError(
                f"--rollouts {rollouts} compares saved samples without a server, so --server {attached[0]} has no "
                "effect: pass one of them"
            )
        if options.overwrite and not attached:
            raise ValueError(
                "--overwrite replaces the weights of running servers: pass their URLs with --server, or remove it"
            )
        if options.layers and rollouts is not None:
            raise ValueError(
                f"--rollouts {rollouts} compares saved samples without a server, but --layers requests the states "
                "of layers from servers: pass one of them"
            )
        self.states = rollout.plan.run_dir.resolve() / "verify" / "states" if options.layers else None
        if self.states is not None:
            rollout = replace(rollout, layer_states=self.states)
        if options.layers and rollout.plan.config.rollout.engine == "vllm":
            raise ValueError(
                "--layers with rollout.engine = 'vllm': a vLLM server does not return the states of its "
                "layers: remove --layers"
            )
        if attached and rollout.plan.config.rollout.engine == "vllm":
            raise ValueError(
                f"--server {attached[0]} with rollout.engine = 'vllm': a vLLM server does not report its model's "
                "shape and layout, so it cannot be compared with the configuration: remove --server, and the "
                "command starts a server"
            )
        self.rollout, self.plan, self.config = rollout, rollout.plan, rollout.plan.config
        self.rollouts, self.checkpoint, self.launcher = rollouts, checkpoint, launcher or Launcher()
        self.may_publish = options.overwrite or not attached
        if prompts is not None and rollouts is not None:
            raise ValueError(
                f"--rollouts {rollouts} uses saved samples, so --prompts {prompts} has no effect: pass one of them"
            )
        self.key = options.key
        self.attached, self.prompts = tuple(attached), PROMPTS if prompts is None else prompts
        self.version = 0 if checkpoint is None else run_state.load(checkpoint).weight_version
        self.weights = self.plan.run_dir / "verify" / "weights"  # while they are compared

    def report(self) -> Report:
        """Starts what is not running, compares both sides and stops what it started. Raises ValueError or RuntimeError
        where a rank or server cannot be started or a call to it fails."""
        self.launcher.check(self.plan)
        if self.states is not None and not self.attached:
            self.states.mkdir(parents=True, exist_ok=True)
        loss = run_algorithm(self.config).loss
        kept = None if self.rollouts is None else read_rollouts(self.rollouts, self.version)
        servers = self.launcher.servers(self.rollout, 0) if kept is None and not self.attached else None
        try:
            with contextlib.nullcontext() if servers is None else servers.naming_failures():
                if servers is not None and self.turns:  # before the trainer is built, which needs the memory
                    run_to_end(release_servers(self.rollout, servers.wait()))
                trainer = self.launcher.trainer(self.plan, loss)
                urls = self.attached if servers is None else servers.wait()
            return run_to_end(self._compare(trainer, urls, kept))
        finally:
            if servers is not None:
                servers.stop()

    async def meet(self) -> None:
        """Query model and settings of the attached servers, before ranks are started. Raises RuntimeError for a server
        that does not answer and ValueError, as `check_attached`, for one that does not fit the job."""
        for url in self.attached:
            client = self.rollout.sglang_client(url, ours=False, key=self.key)
            try:
                info = await client.model_info()
                check_attached(client.url, info, await client.server_info(), self.plan)
                if not info.weight_version.isdecimal():  # "default", where no version was set
                    await client.set_weight_version(self.version)
            finally:
                await client.close()

    @property
    def turns(self) -> bool:
        """Whether both sides take turns: servers that are given or not needed are on other devices."""
        return self.rollouts is None and not self.attached and self.config.takes_turns

    @property
    def _publishes_first(self) -> bool:
        """Whether the trainer's weights are published before the servers sample, as a run does."""
        return self.config.precision.qat or self.checkpoint is not None or self.turns

    async def _compare(self, ranks: RayTrainer, urls: Sequence[str], kept: Sequence[SampleGroup] | None) -> Report:
        rollout, data = self.rollout, self.config.data
        taking = TurnTaking(rollout, urls, {"trainer": ranks}) if self.turns else None
        trainer: TrainerRanks = ranks if taking is None else taking.models["trainer"]
        prompts = PromptSource(data, self.plan.tokenizer, seed=self.config.seed).all()
        compare = comparison(rollout, trainer, prompts[: self.prompts])
        if self.checkpoint is not None:
            await trainer.load(self.checkpoint.resolve() / "trainer")
        clients = [
            rollout.client(url, ours=not self.attached, key=self.key, turns=None if taking is None else taking.turns)
            for url in urls
        ]
        try:
            if kept is not None:
                return await compare.of(kept, prompts=_now(kept, prompts), weights="no server is used")
            await check_bits(rollout, trainer, clients)
            published = await self._published(ranks)
            if self.may_publish:
                trainer.connect(rollout.publisher(urls, ours=not self.attached, key=self.key))
            live = LiveRollout(
                client=clients[0],
                publish=(lambda: trainer.publish(version=self.version)) if self.may_publish else None,
                sample=lambda: compare.sample(clients),
                prompts_per_request=self.config.rollout.prompts_per_request,
            )
            if not self.attached and self._publishes_first:
                await trainer.publish(version=self.version)  # as a run does before its first step
            # hashes of the served weights, before anything is sent to a server that was not started here
            served = [(await client.checksum()).tensors for client in clients]
            seen = [] if self.states is None else [c for c in clients if isinstance(c, SGLangClient)]
            layers = await drill_down(rollout, trainer, prompts).of(seen) if seen else []
            groups = await compare.sample(clients)
            weights = await self._weights(clients, served, published, live)
            report = await compare.of(groups, weights=weights, rollout=live)
            return report.with_layers(layers) if layers else report
        finally:
            for client in clients:
                await client.close()
            if taking is not None:
                await taking.close()
            await trainer.close()
            for made in (self.weights, self.states):
                if made is not None:
                    shutil.rmtree(made, ignore_errors=True)

    async def _published(self, trainer: RayTrainer) -> Published:
        """The trainer's weights before encoding, written to a directory in BF16."""
        plan, out = self.plan, self.weights
        shutil.rmtree(out, ignore_errors=True)
        config = quantized_config(plan.hf.config, None)
        trainer.connect(CheckpointWriter(out=out, hf_config=config, spec=None, copy_from=plan.served))
        await trainer.publish(version=0)
        return Published(out, plan.model.spec)

    async def _weights(
        self,
        clients: Sequence[ServerClient],
        served: Sequence[Mapping[str, str]],
        published: Published,
        rollout: LiveRollout,
    ) -> WeightEvidence | str:
        """Evidence of the server with the most differing tensors; a string is the reason why there is no comparison.

        served: each server's hashes. The embedded engine hashes stored tensors, which are compared directly. Where
        nothing was published, codes of the job's checkpoint count as published where they decode to the trainer's
        weights. Stock SGLang hashes the tensors that it derives from the stored ones. For a CPU
        server with BF16 weights on one rank, the same tensors are derived here from the trainer's weights; for any
        other, the trainer's weights are published to the server, if that is allowed, and its hashes before and after
        are compared.
        """
        plan = self.plan
        if self.config.rollout.engine == "embedded":
            stored = plan.hf.weights()
            expected = published.hashes(None if self._publishes_first else stored)
            of_each = [weight_evidence(published, expected, hashes, stored) for hashes in served]
        elif self.config.rollout.engine == "vllm":
            return "vLLM hashes the fused tensors that it builds from the published ones, in the layout of its kernels"
        elif found := await self._stacked(clients, served, published):
            of_each = found
        elif rollout.publish is None:
            return _OPAQUE
        elif plan.model.spec is not None and not self._publishes_first:
            return "the first publication replaces the codes of the checkpoint, which another quantizer may have made"
        else:
            await rollout.publish()
            after = [(await client.checksum()).tensors for client in clients]
            of_each = [opaque_evidence(a, before, published) for a, before in zip(after, served, strict=True)]
        return max(of_each, key=lambda e: len(e.differing))

    async def _stacked(
        self, clients: Sequence[ServerClient], served: Sequence[Mapping[str, str]], published: Published
    ) -> list[WeightEvidence]:
        """Evidence of each server from its hashes alone; empty where it is unknown which tensors the servers hash."""
        if self.plan.model.spec is not None or self.config.rollout.sglang.tp_size > 1:
            return []
        devices = [(await client.server_info()).get("device") for client in clients]
        found = [stacked_evidence(hashes, published) for hashes in served] if set(devices) == {"cpu"} else []
        known = [evidence for evidence in found if evidence is not None]
        return known if len(known) == len(served) else []


_OPAQUE = (
    "stock SGLang hashes the fused tensors that it builds from the published ones; with --overwrite this command "
    "publishes to the server and compares its hashes before and after"
)


def check_attached(url: str, info: ModelInfo, server: Mapping[str, Any], plan: ModelPlan) -> None:
    """server: the resolved arguments of the server at `url`. Raises ValueError, with the remedy, for a server of
    another kind, model or number of ranks than the job's, or one that reports no routes."""
    rollout, wanted = plan.config.rollout, tuple(plan.hf.config.get("architectures") or ())
    kind = "embedded" if server.get("version") == "embedded" else "sglang"
    if kind != rollout.engine:
        raise ValueError(
            f"server {url} is {_KINDS[kind]}, but rollout.engine = {rollout.engine!r}: pass --set rollout.engine={kind}"
        )
    if info.architectures != wanted:
        raise ValueError(
            f"server {url} serves {', '.join(info.architectures) or 'an unnamed model'} ({info.model_path}), but "
            f"{plan.served} is {', '.join(wanted)}: use a server of this model"
        )
    ranks = int(server.get("tp_size", 1))
    if kind == "sglang" and ranks != rollout.sglang.tp_size:
        raise ValueError(
            f"server {url} has {ranks} tensor-parallel ranks, but rollout.sglang.tp_size = "
            f"{rollout.sglang.tp_size}: pass --set rollout.sglang.tp_size={ranks}"
        )
    if plan.model.routing is not None and not server.get("enable_return_routed_experts"):
        raise ValueError(f"server {url} does not return expert routes: start it with --enable-return-routed-experts")


_KINDS = {"embedded": "an embedded engine", "sglang": "stock SGLang"}


def _now(kept: Sequence[SampleGroup], prompts: Sequence[Prompt]) -> list[Sequence[int]] | None:
    """Tokens of each kept sample's prompt as the tokenizer and template encode it now; None where a prompt is not in
    `prompts`."""
    ids = [g.prompt.id for g in kept]
    wanted = set(ids)
    made = {p.id: p.token_ids for p in prompts if p.id in wanted}
    return [made[i] for i in ids] if all(i in made for i in ids) else None


def read_rollouts(path: Path, version: int) -> list[SampleGroup]:
    """Samples of a `rollouts/step_N.jsonl`, each as one group. Raises ValueError for a file that cannot be read, holds
    no samples or lacks token ids (files of older runs do), and for tokens of another weight version than `version`."""
    try:
        lines = json_lines(read_text(path, ROLLOUTS_BYTES))
    except OSError as e:
        raise ValueError(f"{path}: {e.strerror}") from None
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 text ({e}): use rollouts/step_N.jsonl of a run") from None
    samples = [_sample(line, f"{path}, line {i + 1}") for i, line in enumerate(lines) if line.strip()]
    if not samples:
        raise ValueError(f"{path} contains 0 samples: use rollouts/step_N.jsonl of a run")
    versions = sorted({v.version for s in samples for v in s.versions})
    if versions not in ([], [version]):
        raise ValueError(
            f"{path} contains tokens of weight versions {versions}, but the trainer has version {version}: pass "
            f"checkpoint of that version (--checkpoint RUN/checkpoints/step_N), or samples of version {version} alone, "
            f"in a synchronous run those of RUN/rollouts/step_{version + 1}.jsonl"
        )
    return [
        SampleGroup(prompt=Prompt(id=s.prompt_id, token_ids=tuple(s.token_ids.tolist()), answer=""), samples=(s,))
        for s in samples
    ]


ROLLOUTS_BYTES = 1 << 30  # largest file that is read
_KEPT = ("token_ids", "loss_mask", "logprobs", "prompt_id", "index", "versions", "finish", "response")


def _sample(line: str, where: str) -> Sample:
    try:
        row: Mapping[str, Any] = parse_json(line)
    except ValueError as e:
        raise ValueError(f"{where} is not JSON: {e}") from None
    if not isinstance(row, dict):
        raise ValueError(
            f"{where} is a JSON {type(row).__name__}, expected an object: use rollouts/step_N.jsonl of a run"
        )
    missing = [k for k in _KEPT if k not in row]
    if missing:
        raise ValueError(
            f"{where} has no {missing[0]!r}, because an older version of miles-like wrote it: repeat the run "
            "with this version"
        )
    try:
        return kept_sample(row, where)
    except (TypeError, RuntimeError, OverflowError, AttributeError, KeyError) as e:
        raise ValueError(f"{where} is damaged or was edited ({e}): use the file as the run wrote it") from None


def kept_sample(row: Mapping[str, Any], where: str) -> Sample:
    mask = torch.tensor(row["loss_mask"], dtype=torch.bool)
    sizes = len(row["token_ids"]), len(mask), len(row["logprobs"])
    if sizes[0] != sizes[1] or sizes[2] != int(mask.sum()):
        raise ValueError(
            f"{where} has {sizes[0]} token_ids, a loss_mask of {sizes[1]} with {int(mask.sum())} set, and "
            f"{sizes[2]} logprobs: the line is damaged or was edited; use the file as the run wrote it"
        )
    logprobs = torch.zeros(len(mask))
    logprobs[mask] = torch.tensor(row["logprobs"], dtype=torch.float32)
    return Sample(
        prompt_id=str(row["prompt_id"]),
        index=int(row["index"]),
        token_ids=torch.tensor(row["token_ids"], dtype=torch.int64),
        loss_mask=mask,
        logprobs=logprobs,
        routing=None,
        versions=tuple(VersionSpan(*v) for v in row["versions"]),
        finish=Finish(row["finish"]),
        text=str(row["response"]),
        row=int(row.get("row", 0)),
    )
