"""The configuration of an algorithm: presets fill in, parts can be swapped, and what would do nothing is refused."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from miles_like.algorithms.losses.cispo import CispoLoss
from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.losses.gspo import GspoLoss
from miles_like.algorithms.registry import make_algorithm, make_critic_loss
from miles_like.config.sections.algorithm import GROUP_LEVEL, PRESETS, AlgorithmConfig, RolloutAlgorithm
from miles_like.config.sections.correction import CorrectionConfig
from miles_like.config.sections.flat import names_of, parts_of, values
from miles_like.config.sections.supervised import SUPERVISED
from miles_like.types import Aggregation
from tests.miles_like.algorithms.advantages.test_advantages import with_values
from tests.support.made_samples import rewarded
from tests.support.refusals import Facts, refuses

OWN = "os.path:join"


@pytest.mark.parametrize("name", [*PRESETS, *SUPERVISED])
def test_the_resolved_configuration_reads_back_as_itself(name):
    """A run resumes from it: nothing that a preset filled in may count as given by hand, or be filled in otherwise."""
    config = AlgorithmConfig(name=name)
    assert AlgorithmConfig(**config.model_dump(exclude_none=True)) == config == AlgorithmConfig(**config.model_dump())


@pytest.mark.parametrize("name", names_of([RolloutAlgorithm]))
def test_every_preset_can_be_built(name):
    made = make_algorithm(AlgorithmConfig(name=name), CorrectionConfig())
    assert made.name == name and isinstance(made.aggregation, Aggregation)


def resolved(**given):
    """key -> value of the resolved [algorithm]."""
    return values(AlgorithmConfig(**given))


def test_presets_by_hand():
    parts = {"advantage": "grpo", "normalize_std": True, "loss": "clipped", "aggregation": "token_mean"}
    assert resolved().items() >= (parts | {"clip_low": 0.2, "clip_high": 0.28}).items()
    parts = {"loss": "gspo", "aggregation": "sequence_mean"}
    assert resolved(name="gspo", clip_high=1e-3).items() >= (parts | {"clip_low": 3e-4, "clip_high": 1e-3}).items()
    dapo = {"filter": "nonzero_std", "overlong_penalty": 1.0, "clip_high": 0.28}
    assert resolved(name="dapo").items() >= dapo.items()
    assert resolved(name="dapo", filter="off", overlong_penalty=0)["filter"] == "off"
    assert AlgorithmConfig(name="ppo").has_critic and not AlgorithmConfig(name="ppo").keeps_reference
    assert make_critic_loss(AlgorithmConfig(name="ppo", value_clip=0.5)).value_clip == 0.5
    assert make_critic_loss(AlgorithmConfig()) is None
    plus = AlgorithmConfig(name="reinforce_pp")
    assert plus.keeps_reference and plus.parts.reference_stream and values(plus)["kl_estimator"] == "k1"
    assert resolved(name="ppo", kl_coefficient=0.1)["kl_in"] == "reward"
    assert resolved(kl_coefficient=0.1)["kl_in"] == "loss"
    assert not AlgorithmConfig(kl_coefficient=0.1).parts.reference_stream
    assert AlgorithmConfig(name="dpo").keeps_reference


def test_any_part_can_be_swapped():
    """With the bounds of the part that comes, not of the one that goes."""
    config = AlgorithmConfig(name="dapo", loss="cispo", advantage="rloo")
    keys = values(config)
    assert (keys["clip_low"], keys["clip_high"], keys["normalize_std"]) == (1.0, 4.0, None)
    assert isinstance(make_algorithm(config, CorrectionConfig()).loss, CispoLoss)
    assert isinstance(make_algorithm(AlgorithmConfig(loss="gspo"), CorrectionConfig()).loss, GspoLoss)
    loss = make_algorithm(AlgorithmConfig(clip_low=0.1, clip_high=0.3, clip_dual=3.0), CorrectionConfig()).loss
    assert loss == ClippedLoss(clip_low=0.1, clip_high=0.3, clip_dual=3.0)


def test_the_constant_and_what_it_defaults_to():
    assert AlgorithmConfig(name="dr_grpo").parts.constant(17) == 17 and AlgorithmConfig().parts.constant(17) is None
    assert AlgorithmConfig(name="dr_grpo", aggregation_constant=9).parts.constant(17) == 9


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"name": "grppo"}, ("algorithm.name", "grppo", "grpo")),
        ({"advantage": "rlo"}, ("algorithm.advantage", "rlo", "rloo")),
        ({"loss": "sap"}, ("algorithm.loss", "sap", "sapo")),
        (
            {"name": "rloo", "normalize_std": False},
            ("algorithm.normalize_std", "False", "rloo"),
        ),
        ({"name": "sapo", "clip_high": 0.3}, ("algorithm.clip_high", 0.3, "algorithm.loss", "sapo")),
        ({"tau_pos": 1.0}, ("algorithm.tau_pos", 1.0, "algorithm.loss", "clipped")),
        ({"gamma": 0.9}, ("algorithm.gamma", 0.9, "algorithm.advantage", "grpo")),
        ({"kl_estimator": "k1"}, ("algorithm.kl_estimator", "k1", "algorithm.kl_coefficient", 0.0)),
        (
            {"kl_coefficient": 0.1, "kl_in": "reward", "kl_unbiased": True},
            ("algorithm.kl_unbiased", "True", "algorithm.kl_in", "reward"),
        ),
        ({"overlong_buffer": 4}, ("algorithm.overlong_buffer", 4, "algorithm.overlong_penalty", 0.0)),
        (
            {"aggregation_constant": 4},
            ("algorithm.aggregation_constant", 4, "token_mean"),
        ),
        ({"aggregation": "tokens"}, ("token_mean",)),
        ({"kl_coefficient": "off"}, ("kl_coefficient", "off", "number")),
        ({"overlong_penalty": "off"}, ("overlong_penalty", "off", "number")),
        ({"kl_coefficient": -0.1}, ("algorithm.kl_coefficient", -0.1, 0)),
        ({"kl_in": "rewrd"}, ("algorithm.kl_in", "rewrd", "loss", "reward")),
        ({"kl_coeficient": 0.1, "gamma": 0.9}, ("kl_coeficient",)),
        ({"of": {"name": "ppo"}}, ("of",)),
        ({"name": "ppo", "shuffle_advantages": True}, ("algorithm.shuffle_advantages", "algorithm.advantage", "ppo")),
        ({"name": "maxrl", "overlong_penalty": 1.0}, ("algorithm.overlong_penalty", 1.0, 0)),
        ({"loss": OWN, "entropy_coefficient": 0.1}, ("algorithm.entropy_coefficient", 0.1, "os.path:join")),
        ({"loss": OWN, "kl_coefficient": 0.1}, ("algorithm.kl_coefficient", 0.1)),
        ({"loss": OWN, "clip_low": 0.1}, ("algorithm.clip_low", 0.1, "algorithm.loss", "os.path:join")),
        ({"name": "sft", "clip_low": 0.1}, ("algorithm.clip_low", 0.1, "algorithm.name", "sft")),
        ({"name": "dpo", "filter": "nonzero_std"}, ("algorithm.filter", "nonzero_std", "algorithm.name", "dpo")),
    ],
)
def test_what_makes_no_sense_is_refused(given, facts: Facts):
    with refuses(ValidationError, *facts):
        AlgorithmConfig(**given)


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"kind": 0}, ("correction.kind", 0, "off")),
        ({"kind": False}, ("correction.kind", "False", "off")),
        ({"kind": "tis", "level": "tokn"}, ("correction.level", "tokn", "token", "k3")),
        ({"kind": "mis", "action": "msk"}, ("correction.action", "msk", "truncate", "mask")),
        ({"level": "tokn"}, ("correction.level", "tokn", "token")),
        ({"kind": "icepop", "level": "sequence"}, ("correction.kind", "icepop", "sequence", "mis")),
        ({"kind": "mis", "level": "k3", "action": "truncate"}, ("correction.kind", "mis", "k3", "truncate")),
    ],
)
def test_a_correction_that_is_not_defined_is_refused(given, facts: Facts):
    with refuses(ValidationError, *facts):
        CorrectionConfig(**given)


@pytest.mark.parametrize(
    ("given", "run", "facts"),
    [
        ({"name": "dapo", "overlong_buffer": 9}, {}, ("algorithm.overlong_buffer", 9, 8)),
        ({"loss": "decoupled"}, {"correction": "tis"}, ("correction.kind", "tis", "decoupled")),
        ({"reference_every": 4}, {}, ("algorithm.reference_every", 4)),
        (
            {"name": "dapo", "advantage": "ppo"},
            {"group": 1},
            ("train.samples_per_group", 1, "algorithm.filter", "nonzero_std"),
        ),
        (
            {"name": "dapo", "filter": "off"},
            {"group": 1},
            ("train.samples_per_group", 1, "algorithm.advantage", "grpo"),
        ),
        ({"loss": OWN}, {"correction": "mis"}, ("correction.kind", "mis")),
        ({"loss": OWN}, {"on_breach": "down_weight"}, ("down_weight",)),
    ],
)
def test_what_does_not_fit_the_run_is_refused(given, run, facts: Facts):
    with refuses(ValueError, *facts):
        AlgorithmConfig(**given).parts.check_run(
            **{"longest_answer": 8, "group": 2, "taught": False, "correction": "off", "on_breach": "warn"} | run
        )


@pytest.mark.parametrize("name", names_of(parts_of(RolloutAlgorithm)["advantage"]))
def test_alone_in_a_group_a_sample_teaches_nothing_where_that_is_said(name):
    """And only there: other advantages allow one answer to a prompt."""
    config = AlgorithmConfig(advantage=name)
    scored = [with_values(g, 0.3) for g in (rewarded([1.0]), rewarded([0.0]), rewarded([2.0]))]
    nothing = not any(
        bool(torch.as_tensor(a).any()) for g in make_algorithm(config, CorrectionConfig()).advantages(scored) for a in g
    )
    assert nothing == (name in GROUP_LEVEL)


def test_supervised_names_have_no_rollout():
    with refuses(ValueError, "sft"):
        make_algorithm(AlgorithmConfig(name="sft"), CorrectionConfig())
