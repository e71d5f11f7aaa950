"""What [reward] says, and what it may not say: a key that would do nothing is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_like.config.load import checked, dump_config, load_config, read_tree
from miles_like.config.run import RunConfig
from miles_like.config.sections.reward import BUILT_IN, RemoteConfig, RewardConfig
from miles_like.rewards.load import Rewards, make_reward
from miles_like.sandbox.config import SandboxConfig
from miles_like.types import Unit
from tests.support.refusals import Facts, refuses

TINY = Path(__file__).parents[4] / "configs" / "tiny.toml"
NEEDED: dict[str, dict[str, Any]] = {
    "regex": {"pattern": "x"},
    "length": {"target": 1, "limit": 2},
    "local_reward_model": {"model": str(TINY.parent / "qwen3_4b")},  # it is loaded by the first call
    **{name: {"url": "http://x"} for name in ("remote", "reward_model", "judge")},
}


def of(**given: Any) -> RewardConfig:
    return RewardConfig.model_validate(given)


def test_nothing_said_is_the_exact_number() -> None:
    assert of().name == "exact_number" and of().weights == {"exact_number": 1.0}


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_can_be_made_by_name(name: str) -> None:
    sandbox = SandboxConfig(kind="remote", url="http://127.0.0.1:1")
    reward = make_reward(of(name=name, **({name: NEEDED[name]} if name in NEEDED else {})), sandbox=sandbox)
    assert reward.unit is (Unit.BATCH if name == "local_reward_model" else Unit.SAMPLE)
    assert reward.slow == (name in ("remote", "reward_model", "judge", "unit_tests"))


@pytest.mark.parametrize(
    ("given", "compares"),
    [
        *(({"name": n}, n) for n in ("exact_number", "exact", "gsm8k", "math_verify", "multiple_choice")),
        *(
            ({"name": n, n: NEEDED.get(n, {})}, None)
            for n in ("format", "length", "remote", "reward_model", "local_reward_model")
        ),
        ({"name": "none"}, None),
        ({"name": "regex", "regex": {"pattern": "x"}}, None),
        ({"name": "regex", "regex": {"pattern": "(?P<answer>x)"}}, "regex"),
        ({"name": "judge", "judge": {"url": "http://x"}}, "judge"),
        ({"name": "judge", "judge": {"url": "http://x", "template": "{prompt} {response}"}}, None),
        ({"name": f"{TINY.parents[1]}/docs/examples/reward.py:short_and_right"}, None),
        ({"parts": {"format": 1, "gsm8k": 0}}, "gsm8k"),
    ],
)
def test_a_reward_says_whether_prompts_need_an_answer(given: dict[str, Any], compares: str | None) -> None:
    """A part that is only logged would end the run just so."""
    assert make_reward(of(**given)).compares == compares


def test_no_reward_needs_something_else_to_learn_from() -> None:
    with refuses(ValueError, "reward.name", "none", 0):
        load_config(TINY, ["reward.name=none"])
    asked = ["environment=m:f", "max_turns=2", "max_episode_tokens=8"]
    assert load_config(TINY, ["reward.name=none", *(f"rollout.{a}" for a in asked)]).reward.name == "none"
    with refuses(ValueError, "heldout"):
        load_config(TINY.with_name("tiny_opd.toml"), ["reward.name=none"])
    tree = read_tree(TINY.with_name("tiny_opd.toml"), ["reward.name=none"])
    tree["eval"] |= {"sets": {"mine": {"path": tree["data"].pop("eval"), "reward": "exact_number"}}}
    assert checked(RunConfig, tree, "").distillation.mode == "alone"


def test_a_configuration_with_parts_comes_back_as_it_was(tmp_path: Path) -> None:
    """Resolved options are shown; a name that is extended can be taken back; a part may be a function."""
    path = tmp_path / "parts.toml"
    path.write_text(
        f'extends = "{TINY}"\n[reward]\nparts = {{ gsm8k = 1.0, format = 0.2, "my.module:f" = 0 }}\n'
        'timeout_s = 5\nretries = 0\n[reward.format.patterns]\nboxed = "boxed"\n'
    )
    config = load_config(path, ["reward.name="])
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.toml") == config
    reward = config.reward
    assert reward.weights == {"gsm8k": 1.0, "format": 0.2, "my.module:f": 0.0} and reward.name is None
    assert "my.module:f" in reward.weights and reward.format is not None
    assert reward.format.patterns == {"boxed": "boxed"}
    assert load_config(TINY, ["reward.name=exact"]).reward.exact is not None


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"name": "gsm8k", "parts": {"exact": 1}}, ("reward.name", "gsm8k", "reward.parts")),
        ({"regex": {"pattern": "x"}}, ("reward.regex", "exact_number", "regex")),
        ({"name": "regex"}, ("regex.pattern",)),
        ({"name": "regex", "regex": {"pattern": "(x"}}, ("regex.pattern", "reward.regex.pattern", "(x")),
        ({"name": "format", "format": {"patterns": {"a": "*"}}}, ("reward.format.patterns.a", "*")),
        ({"name": "format", "format": {"patterns": {}}}, (1, "format.patterns", 0)),
        ({"style": "trl"}, ("reward.style", "exact_number")),
        ({"unit": "batch"}, ("reward.unit",)),
        ({"name": "a:b", "style": "verl", "args": {"a": 1}}, ("reward.args",)),
        ({"timeout_s": 5}, ("reward.timeout_s", "exact_number")),
        ({"name": "gsm8k", "retries": 0}, ("reward.retries", "gsm8k")),
        (
            {"name": "length", "length": {"target": 1, "limit": 2}, "retry_wait_s": 1},
            ("reward.retry_wait_s",),
        ),
        ({"name": "math_verify", "concurrency": 2}, ("reward.concurrency", "math_verify")),
        ({"name": "length", "length": {"target": 5, "limit": 5}}, ("reward.length.limit", 5, 5)),
        ({"name": "remote", "remote": {"url": "x.org"}}, ("x.org", "URL", "http://x.org")),
        ({"name": "judge", "judge": {"url": "http://x", "template": "{prompt}"}}, ("reward.judge.template",)),
        ({"name": "judge", "judge": {"url": "http://x", "pattern": "[0-9]"}}, ("reward.judge.pattern", "[0-9]")),
        ({"name": "judge", "judge": {"url": "http://x", "low": 1, "high": 1}}, ("reward.judge.low", 1.0, 1.0)),
        (
            {"name": "reward_model", "reward_model": {"url": "http://x", "send": "chat"}},
            ("reward.reward_model.send", "chat", "reward.reward_model.tokenizer"),
        ),
        (
            {"name": "reward_model", "reward_model": {"url": "http://x", "model": "m"}},
            ("reward.reward_model.model", "m", "classify"),
        ),
        ({"parts": {"exact": float("nan")}}, ("parts.exact",)),
        ({"parts": {"exact": 1, "none": 1}}, ("reward.parts", "none", 0)),
        ({"nmae": "exact"}, ("nmae",)),
    ],
)
def test_what_does_nothing_or_cannot_be_is_refused(given: dict[str, Any], facts: Facts) -> None:
    with refuses(ValueError, *facts):
        of(**given)


def test_what_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    with refuses(ValueError, "reward.name", "exact_nubmer", "exact_number"):
        make_reward(of(name="exact_nubmer"))
    with refuses(ValueError, "reward.parts", "gsm9k", "gsm8k"):
        make_reward(of(parts={"gsm9k": 1.0}))
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("def f(prompt, sample):\n    return 1.0\ndef g(x):\n    return 1.0\n")
    with refuses(ValueError, "reward.parts", "f"):
        make_reward(of(parts={f"{tmp_path}/a.py:f": 1.0, f"{tmp_path}/b.py:f": 1.0}))
    with refuses(ValueError, "reward.name", "a.py:g"):
        make_reward(of(name=f"{tmp_path}/a.py:g"))
    (tmp_path / "run.toml").write_text(f'extends = "{TINY}"\n[reward.parts]\n"./a.py:f" = 1\n')
    assert load_config(tmp_path / "run.toml").reward.weights.keys() == {f"{tmp_path}/a.py:f"}  # as the file sees it
    both = make_reward(of(parts={f"{tmp_path}/a.py:f": 1.0, "exact": 1.0}))
    assert both.unit is Unit.SAMPLE and not both.slow


def test_a_set_of_an_evaluation_may_have_another_reward() -> None:
    """With the options that the run has for it; the run's own is made once."""
    rewards = Rewards(of(parts={"exact": 1.0, "regex": 0.0}, exact={"ignore_case": True}, regex={"pattern": "x"}))
    assert rewards(None) is rewards(None) is not rewards("regex")
    assert rewards("gsm8k") is rewards("gsm8k")
    with refuses(ValueError, "judge", "reward.parts", "[reward.judge]"):
        rewards("judge")
    with refuses(ValueError, "gsm8k"):
        rewards("gsm9k")


def test_a_reward_that_an_evaluation_names_is_called_as_the_run_calls_it() -> None:
    """The same reward under another time limit would give up other samples; a key that it does not read is left out."""
    run = RewardConfig(
        parts={"math_verify": 1.0, "m:f": 1.0, "gsm8k": 0.0},
        timeout_s=7,
        style="slime",
        args={"bonus": 2},
        concurrency=3,
    )
    own, other = run.named("m:f"), run.named("m:g")
    assert (own.timeout_s, own.style, own.args, own.concurrency) == (7, "slime", {"bonus": 2}, 3)
    assert (other.timeout_s, other.style, other.args, other.concurrency) == (7, None, {}, 3)
    assert (run.named("math_verify").timeout_s, run.named("math_verify").concurrency) == (7, None)
    assert run.named("gsm8k") == RewardConfig(name="gsm8k")


def test_a_key_is_not_sent_in_the_open_nor_written_in_a_url(tmp_path: Path) -> None:
    section = {"url": "http://10.0.0.7:3000", "key_file": "key"}
    with refuses(ValueError, "https://"):
        RemoteConfig.model_validate(section)
    for given in ({"key_over_http": True}, {"url": "https://10.0.0.7"}, {"url": "http://[::1]:3"}, {"key_file": None}):
        RemoteConfig.model_validate(section | given)
    with refuses(ValueError, "key_over_http"):
        RemoteConfig.model_validate({"url": "https://a", "key_file": "key", "key_over_http": True})
    path = tmp_path / "run.toml"
    secret = 'extends = "{}"\n[reward]\nname = "remote"\n[reward.remote]\nurl = "https://me:hunter2@10.0.0.7/x"'
    path.write_text(secret.format(TINY))
    with refuses(ValueError, "10.0.0.7/x", "key_file") as caught:
        load_config(path)
    assert "hunter2" not in str(caught.value)
