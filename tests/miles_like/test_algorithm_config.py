"""The configuration of an algorithm: presets fill in, parts can be swapped, and what would do nothing is refused."""

from __future__ import annotations

import pytest
import torch
from pydantic import ValidationError

from miles_like.algorithm_config import (
    ADVANTAGE_KEYS,
    LOSS_KEYS,
    OF_GROUPS,
    PRESETS,
    AlgorithmConfig,
    CorrectionConfig,
)
from miles_like.algorithms.losses.cispo import CispoLoss
from miles_like.algorithms.losses.clipped import ClippedLoss
from miles_like.algorithms.losses.gspo import GspoLoss
from miles_like.algorithms.registry import LOSSES, make_algorithm, make_critic_loss
from miles_like.supervised_config import SUPERVISED
from miles_like.types import Aggregation
from tests.miles_like.made_samples import rewarded
from tests.miles_like.test_advantages import with_values

OWN = "os.path:join"


@pytest.mark.parametrize("name", [*PRESETS, *SUPERVISED])
def test_the_resolved_configuration_reads_back_as_itself(name):
    """A run resumes from it: nothing that a preset filled in may count as given by hand, or be filled in otherwise."""
    config = AlgorithmConfig(name=name)
    assert AlgorithmConfig(**config.model_dump(exclude_none=True)) == config == AlgorithmConfig(**config.model_dump())


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_built(name):
    made = make_algorithm(AlgorithmConfig(name=name), CorrectionConfig())
    assert made.name == name and isinstance(made.aggregation, Aggregation)


def test_presets_by_hand():
    grpo, gspo = AlgorithmConfig(), AlgorithmConfig(name="gspo", clip_high=1e-3)
    assert (grpo.advantage, grpo.loss, grpo.aggregation) == ("grpo", "clipped", "token_mean")
    assert (grpo.clip_low, grpo.clip_high, grpo.normalize_std) == (0.2, 0.28, True)
    assert (gspo.loss, gspo.aggregation, gspo.clip_low, gspo.clip_high) == ("gspo", "sequence_mean", 3e-4, 1e-3)
    dapo = AlgorithmConfig(name="dapo")
    assert (dapo.filter, dapo.overlong_penalty, dapo.clip_high) == ("nonzero_std", 1.0, 0.28)
    assert AlgorithmConfig(name="dapo", filter="off", overlong_penalty=0).filter == "off"
    assert AlgorithmConfig(name="ppo").has_critic and not AlgorithmConfig(name="ppo").keeps_reference
    assert make_critic_loss(AlgorithmConfig(name="ppo", value_clip=0.5)).value_clip == 0.5
    assert make_critic_loss(AlgorithmConfig()) is None
    plus = AlgorithmConfig(name="reinforce_pp")
    assert plus.keeps_reference and plus.reference_stream and plus.kl_estimator == "k1"
    assert AlgorithmConfig(name="ppo", kl_coefficient=0.1).kl_in == "reward"
    kl = AlgorithmConfig(kl_coefficient=0.1)
    assert kl.kl_in == "loss" and not kl.reference_stream
    assert AlgorithmConfig(name="dpo").keeps_reference


def test_any_part_can_be_swapped():
    """With the bounds of the part that comes, not of the one that goes."""
    config = AlgorithmConfig(name="dapo", loss="cispo", advantage="rloo")
    assert (config.clip_low, config.clip_high, config.normalize_std) == (1.0, 4.0, None)
    assert isinstance(make_algorithm(config, CorrectionConfig()).loss, CispoLoss)
    assert isinstance(make_algorithm(AlgorithmConfig(loss="gspo"), CorrectionConfig()).loss, GspoLoss)
    loss = make_algorithm(AlgorithmConfig(clip_low=0.1, clip_high=0.3, clip_dual=3.0), CorrectionConfig()).loss
    assert loss == ClippedLoss(clip_low=0.1, clip_high=0.3, clip_dual=3.0)


def test_the_constant_and_what_it_defaults_to():
    assert AlgorithmConfig(name="dr_grpo").constant(17) == 17 and AlgorithmConfig().constant(17) is None
    assert AlgorithmConfig(name="dr_grpo", aggregation_constant=9).constant(17) == 9


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "grppo"}, r"unknown algorithm\.name 'grppo': did you mean 'grpo'\?"),
        ({"advantage": "rlo"}, r"unknown algorithm\.advantage 'rlo': did you mean 'rloo'\?"),
        ({"loss": "sap"}, r"unknown algorithm\.loss 'sap': did you mean 'sapo'\?"),
        (
            {"name": "rloo", "normalize_std": False},
            r"normalize_std = False does nothing with .* = \'rloo\'",
        ),
        ({"name": "sapo", "clip_high": 0.3}, r"clip_high = 0\.3 does nothing with algorithm\.loss = 'sapo'"),
        ({"tau_pos": 1.0}, r"tau_pos = 1\.0 does nothing with algorithm\.loss = 'clipped'"),
        ({"gamma": 0.9}, r"gamma = 0\.9 does nothing with algorithm\.advantage = 'grpo'"),
        ({"kl_estimator": "k1"}, r"kl_estimator = 'k1' does nothing with algorithm\.kl_coefficient = 0"),
        (
            {"kl_coefficient": 0.1, "kl_in": "reward", "kl_unbiased": True},
            r"kl_unbiased = True does nothing with algorithm\.kl_in = 'reward'",
        ),
        ({"overlong_buffer": 4}, r"overlong_buffer = 4 does nothing with algorithm\.overlong_penalty = 0"),
        (
            {"aggregation_constant": 4},
            r"aggregation_constant = 4 does nothing with .* = \'token_mean\'",
        ),
        ({"aggregation": "tokens"}, r"token_mean"),
        ({"name": "ppo", "shuffle_advantages": True}, r"shuffle_advantages with algorithm\.advantage = 'ppo'"),
        ({"name": "maxrl", "overlong_penalty": 1.0}, r"overlong_penalty = 1\.0 makes rewards below 0"),
        ({"loss": OWN, "entropy_coefficient": 0.1}, r"entropy_coefficient does nothing with a loss of your own"),
        ({"loss": OWN, "kl_coefficient": 0.1}, r"kl_coefficient = 0\.1 does nothing with a loss of your own"),
        ({"loss": OWN, "clip_low": 0.1}, r"clip_low = 0\.1 does nothing with algorithm\.loss = 'os\.path:join'"),
        ({"name": "sft", "clip_low": 0.1}, r"clip_low = 0\.1 does nothing with algorithm\.name = 'sft'"),
        ({"name": "dpo", "filter": "nonzero_std"}, r"filter = 'nonzero_std' does nothing with algorithm\.name = 'dpo'"),
    ],
)
def test_what_makes_no_sense_is_refused(given, said):
    with pytest.raises(ValidationError, match=said):
        AlgorithmConfig(**given)


@pytest.mark.parametrize(
    ("given", "run", "said"),
    [
        ({"name": "dapo", "overlong_buffer": 9}, {}, r"overlong_buffer = 9 tokens below a limit of 8"),
        ({"loss": "decoupled"}, {"correction": "tis"}, r"correction\.kind = 'tis' does nothing with .* 'decoupled'"),
        ({"reference_every": 4}, {}, r"reference_every = 4 does nothing without a reference"),
        (
            {"name": "dapo", "advantage": "ppo"},
            {"group": 1},
            r"samples_per_group = 1 with algorithm\.filter = 'nonzero",
        ),
        (
            {"name": "dapo", "filter": "off"},
            {"group": 1},
            r"train\.samples_per_group = 1 with algorithm\.advantage = 'grpo'",
        ),
        ({"loss": OWN}, {"correction": "mis"}, r"correction\.kind = 'mis' does nothing .* a loss of your own"),
        ({"loss": OWN}, {"on_breach": "down_weight"}, r"'down_weight' does nothing with a loss of your own"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(given, run, said):
    with pytest.raises(ValueError, match=said):
        AlgorithmConfig(**given).check_run(
            **{"longest_answer": 8, "group": 2, "taught": False, "correction": "off", "on_breach": "warn"} | run
        )


@pytest.mark.parametrize("name", ADVANTAGE_KEYS)
def test_alone_in_a_group_a_sample_teaches_nothing_where_that_is_said(name):
    """And only there: nobody else is kept from one answer to a prompt."""
    config = AlgorithmConfig(advantage=name)
    scored = [with_values(g, 0.3) for g in (rewarded([1.0]), rewarded([0.0]), rewarded([2.0]))]
    nothing = not any(
        bool(torch.as_tensor(a).any()) for g in make_algorithm(config, CorrectionConfig()).advantages(scored) for a in g
    )
    assert nothing == (name in OF_GROUPS)


def test_supervised_names_have_no_rollout():
    with pytest.raises(ValueError, match=r"'sft' has no rollout"):
        make_algorithm(AlgorithmConfig(name="sft"), CorrectionConfig())


def test_the_dict_and_the_keys_name_the_same():
    assert set(LOSSES) == set(LOSS_KEYS)
