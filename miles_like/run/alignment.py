"""Comparisons of the two sides of a run: before the first step, while it runs, and by `verify`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from torch import Tensor

from miles_like.algorithms.registry import make_bounds
from miles_like.alignment.allowance import allowance, rounding_units
from miles_like.alignment.drill_down import DrillDown
from miles_like.alignment.known_answer import KnownAnswer, text_of
from miles_like.alignment.live import Comparison, LiveTrainer
from miles_like.alignment.same_bits import check_same_bits
from miles_like.alignment.server_checks import Fleet, RunChecks
from miles_like.config.run import RunConfig
from miles_like.protocols import TrainerRanks
from miles_like.run.setup.rollout_side import RolloutSide
from miles_like.run.setup.trainer_side import packer
from miles_like.types import Prompt, PublishReport, ServerLost
from rollout.episodes.serving import Serving
from rollout.seeds import seed_of
from rollout.sglang.client import ServerClient

LAYER_TOKENS = 64  # of the text whose residual streams are compared: a token has (2L + 1) * H numbers


def comparison(rollout: RolloutSide, trainer: TrainerRanks, prompts: Sequence[Prompt]) -> Comparison:
    """The comparison of trainer and servers on samples of `prompts`; nothing is sampled yet."""
    plan, c = rollout.plan, rollout.plan.config
    bounds = make_bounds(c.mismatch)
    shape = None if c.replay.gates else plan.model.routing  # the gates of corrected routes are not known
    routed = shape is not None or not plan.model.family.moe_layers(plan.hf.config)
    return Comparison(
        trainer=LiveTrainer(trainer=trainer, packer=packer(plan, trainer.dp_size, replayed=False), shape=shape),
        replay=c.replay.mode == "r3",
        prompts=prompts,
        params=replace(rollout.sampling(0), sampling_seed=seed_of(c.seed, "verify")),
        bounds=bounds,
        allowed=allowance(
            bounds, c.precision, engine=c.rollout.engine, exact=c.bit_exact, more=c.one_side_rounds, routed=routed
        ),
    )


def drill_down(rollout: RolloutSide, trainer: TrainerRanks, prompts: Sequence[Prompt]) -> DrillDown:
    """The comparison of residual streams on the first tokens of `prompts`."""
    c, hf = rollout.plan.config, rollout.plan.hf.config
    text = text_of([p.token_ids for p in prompts], min(LAYER_TOKENS, c.max_pack_tokens))
    rounding, of_stream = rounding_units(
        c.precision, engine=c.rollout.engine, exact=c.bit_exact, more=c.one_side_rounds
    )
    return DrillDown(
        trainer=comparison(rollout, trainer, ()).trainer,
        text=text,
        values=len(text) * (2 * int(hf["num_hidden_layers"]) + 1) * int(hf["hidden_size"]),
        rounding=rounding,
        of_stream=of_stream,
    )


def known_answer(rollout: RolloutSide, trainer: TrainerRanks, prompts: Sequence[Prompt]) -> KnownAnswer:
    """One text for all publications of a run, of `answer_tokens`."""
    c = rollout.plan.config
    of_run = comparison(rollout, trainer, ())
    assert of_run.allowed.kl_max is not None, "`allowance` bounds it"
    text = text_of([p.token_ids for p in prompts], answer_tokens(c, rollout.plan.hf.config))
    return KnownAnswer(
        trainer=of_run.trainer,
        text=text,
        settings=_settings_of_gaps(c, text),
        kl_max=of_run.allowed.kl_max,
        exact=c.bit_exact,
        usual=not c.replay.gates,
    )


def answer_tokens(c: RunConfig, hf: Mapping[str, Any]) -> int:
    """`publish.answer_tokens`, but no more than a prompt may have, a micro-batch holds, or a server scores: it samples
    a token after them. hf: config.json."""
    served = c.rollout.served_tokens or int(hf.get("max_position_embeddings", 1 << 31))
    return min(c.publish.answer_tokens, c.data.max_prompt_tokens, c.max_pack_tokens, served - 1)


def _settings_of_gaps(c: RunConfig, text: Tensor) -> str:
    """A hash of what a server's usual difference from the trainer depends on: text, engine, precision, kernels."""
    parts = [
        c.rollout.engine,
        *(s.model_dump(mode="json") for s in (c.rollout.embedded, c.rollout.sglang, c.rollout.vllm)),
    ]
    parts += [s.model_dump(mode="json") for s in (c.precision, c.kernels, c.parallel, c.alignment)]
    return hashlib.sha256(json.dumps([*parts, text.tolist()], sort_keys=True).encode()).hexdigest()


async def check_bits(
    rollout: RolloutSide, trainer: TrainerRanks, clients: Sequence[ServerClient], serving: Serving | None = None
) -> None:
    """With `alignment.deterministic` on CPU ranks: raises ValueError, as `check_same_bits`, where trainer and servers
    do not compute the same bits. No other run is checked. serving: which servers are asked, and which of them are lost
    is noted there; None: all."""
    c = rollout.plan.config
    if (shards := c.tp_shards) and c.bit_exact:
        infos = {}
        for client in clients if serving is None else [c for c in clients if c in serving]:
            try:
                infos[client.url] = await client.server_info()
            except ServerLost as e:
                if serving is None:
                    raise
                serving.lose(client, e)
        check_same_bits(trainer.fingerprint(), infos, tp_shards=shards, dtype=rollout.plan.model.trainer.params_dtype)


def server_checks(
    rollout: RolloutSide,
    trainer: TrainerRanks,
    clients: Sequence[ServerClient],
    prompts: Sequence[Prompt],
    console: Console,
    publish: Callable[[int], Awaitable[PublishReport]],
    fleet: Fleet | None = None,
) -> RunChecks:
    """The checks of a run's servers between two steps, on samples of `prompts`. publish: publishes a version once
    more."""
    c = rollout.plan.config
    return RunChecks(
        clients=clients,
        known=known_answer(rollout, trainer, prompts) if c.publish.answer_tokens else None,
        republish=publish,
        comparison=comparison(rollout, trainer, ()),
        prompts=prompts,
        check_prompts=c.mismatch.check_prompts,
        check_every=c.mismatch.check_every,
        checksums_every=c.mismatch.checksums_every,
        seed=c.seed,
        idle=not c.in_flight_at_publication,
        console=console,
        turns=c.takes_turns,
        fleet=fleet,
    )
