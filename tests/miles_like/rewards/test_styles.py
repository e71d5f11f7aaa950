"""Functions written for other frameworks, asked by us, get and mean what they get and mean there.

TRL is installed: its own reward functions are asked here and by its trainer's own method, and must say the same. The
others are held to what their sources do (verl: reward_loop/reward_manager/naive.py; slime: rollout/rm_hub; OpenRLHF:
utils/agent.py). Not covered: frameworks' own arguments beyond those, such as TRL's trainer_state.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import dataclasses
import enum
import functools
import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from miles_like.config.sections.reward import RewardConfig
from miles_like.rewards.load import scored_by
from miles_like.types import Finish, Prompt, Sample, Score, Unscored
from tests.support.made_samples import sample
from tests.support.refusals import refuses

ASKED = ("Count to three.", "Say four.")
ANSWERS = ("<think>one, two</think> 3", "three", "<think>hm</think><think>4", "4 4 4 4 4 4")


def prompts(*, chat: bool = True, **columns: Sequence[Any]) -> list[Prompt]:
    """Two, with columns of the prompt file."""
    return [
        Prompt(
            id=f"p{i}",
            token_ids=(1, 2),
            answer=str(3 + i),
            text=f"<user>{text}<assistant>",
            source="counting",
            messages=({"role": "user", "content": text},) if chat else (),
            meta={"answer": str(3 + i), **{k: v[i] for k, v in columns.items()}},
        )
        for i, text in enumerate(ASKED)
    ]


def samples() -> list[Sample]:
    """Two of each prompt."""
    return [sample(f"p{i // 2}", i % 2, response_len=2 + i, text=text) for i, text in enumerate(ANSWERS)]


def asked(function: Callable[..., Any], of: list[Prompt] | None = None, **config: Any) -> list[Score | Unscored]:
    async def run() -> list[Score | Unscored]:
        reward = scored_by(function, RewardConfig(name="m:f", retries=0, **config))
        given = [p for p in of or prompts() for _ in range(2)]
        try:
            return list(await reward(given, samples()))
        finally:
            await reward.close()

    return asyncio.run(run())


# verl


def test_verl() -> None:
    """Keywords by verl's names; extra_info is the column of that name, or all columns. Text beside the score is not
    logged, numbers are."""
    seen: list[dict[str, Any]] = []

    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        seen.append({"source": data_source, "solution": solution_str, "truth": ground_truth, "extra": extra_info})
        extra_info["num_turns"] = 1  # verl's own loop does
        right = solution_str.endswith(ground_truth)
        return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str}

    found = asked(compute_score, prompts(extra_info=[{"split": "a"}, {"split": "b"}], data_source=["x/y", "z"]))
    assert [o.value for o in found] == [1, -1, 1, 1] and found[0].parts == {"acc": 1.0}
    assert sorted(s["solution"] for s in seen) == sorted(ANSWERS)
    first = next(s for s in seen if s["solution"] == ANSWERS[0])
    assert (first["source"], first["truth"], first["extra"]) == ("x/y", "3", {"split": "a", "num_turns": 1})
    seen.clear()
    asked(compute_score, prompts(level=[1, 2]))
    assert {s["source"] for s in seen} == {"counting"} and {s["extra"]["level"] for s in seen} == {1, 2}
    assert [o.value for o in asked(lambda solution_str, ground_truth, **kw: len(kw))] == [2.0] * 4


def test_verl_without_a_score_is_refused() -> None:
    """verl reads result["score"] and nothing else; a sum of the others would be an unintended reward."""
    with refuses(RuntimeError, "score"):
        asked(lambda data_source, solution_str, ground_truth, extra_info: {"acc": 1.0}, concurrency=1)


# slime and Miles


def test_slime_by_sample_and_by_group() -> None:
    """What a custom_rm reads of its sample, and of its args."""

    async def custom_rm(args, sample, **kwargs):
        assert sample.status is sample.Status.COMPLETED and isinstance(sample.status, enum.Enum)
        assert (sample.prompt, sample.metadata["level"]) in (
            ("<user>Count to three.<assistant>", 1),
            ("<user>Say four.<assistant>", 2),
        )
        assert len(sample.tokens) == 2 + sample.response_length == 2 + len(sample.loss_mask)
        assert sample.effective_response_length == sum(sample.loss_mask) and sample.status is not sample.Status.FAILED
        assert len(sample.rollout_log_probs) == sample.response_length and sample.weight_versions == ["0"]
        sample.reward = 99  # its own copy
        return args.right if sample.response.endswith(sample.label) else 0

    async def group_rm(args, samples, **kwargs):
        return [{"score": s.index, "size": len(samples)} for s in samples]

    for of in (prompts(level=[1, 2]), prompts(metadata=[{"level": 1}, {"level": 2}])):  # slime's files have the latter
        assert [o.value for o in asked(custom_rm, of, args={"right": 2})] == [2, 0, 2, 2]
    assert asked(group_rm) == [Score(value=float(i), parts={"size": 2.0}) for i in (0, 1, 0, 1)]


def test_slime_takes_the_reward_that_reward_key_names() -> None:
    found = asked(lambda args, sample: {"math": 1.0, "style": 0.5}, args={"reward_key": "math"})
    assert found == [Score(value=1.0, parts={"style": 0.5})] * 4
    with refuses(RuntimeError, "code"):
        asked(lambda args, sample: {"math": 1.0}, args={"reward_key": "code"}, concurrency=1)


def test_slime_says_what_was_cut_off() -> None:
    cut = [dataclasses.replace(s, finish=Finish.LENGTH) for s in samples()]

    async def run() -> list[Score | Unscored]:
        reward = scored_by(lambda args, sample: sample.status.value == "truncated")
        return list(await reward([p for p in prompts() for _ in range(2)], cut))

    assert asyncio.run(run()) == [Score(value=1.0)] * 4


# OpenRLHF


def test_openrlhf_in_lists_of_one_and_of_many() -> None:
    """Its agents call with lists of one; a single number of extra_logs is every sample's."""
    sizes: list[int] = []

    def reward_func(queries, prompts, labels, **kwargs):
        sizes.append(len(queries))
        assert all(q.startswith(p) for q, p in zip(queries, prompts, strict=True))
        right = torch.tensor([q.endswith(a) for q, a in zip(queries, labels, strict=True)]).float()
        return {"rewards": right - 0.5, "scores": right, "extra_logs": {"size": len(queries), "right": right}}

    want = [Score(value=r - 0.5, parts={"scores": r, "right": r}) for r in (1.0, 0.0, 1.0, 1.0)]
    for unit, called in ((None, [1] * 4), ("group", [2, 2]), ("batch", [4])):
        sizes.clear()
        found = asked(reward_func, unit=unit)
        assert sizes == called and {o.parts["size"] for o in found} == {float(called[0])}
        assert [Score(value=o.value, parts={k: v for k, v in o.parts.items() if k != "size"}) for o in found] == want
    assert asked(lambda queries, prompts, labels: torch.ones(len(queries)), unit="batch") == [Score(value=1.0)] * 4
    with refuses(RuntimeError, "rewards"):
        asked(lambda queries, prompts, labels: {"scores": torch.ones(1)}, concurrency=1)


# TRL


@functools.cache
def trls_own_method() -> Callable[..., Any]:
    """GRPOTrainer._calculate_rewards as it is installed; to import its module would take a quarter of a minute."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text())
    (method,) = (n for n in ast.walk(tree) if getattr(n, "name", None) == "_calculate_rewards")
    method.decorator_list = []
    names: dict[str, Any] = {
        "torch": torch,
        "nn": torch.nn,
        "asyncio": asyncio,
        "logger": logging.getLogger("trl"),
        "gather": lambda rewards: rewards,
        "profiling_context": lambda trainer, name: contextlib.nullcontext(),
        "is_async_callable": inspect.iscoroutinefunction,
    }
    exec(compile(ast.Module([method], []), "grpo_trainer.py", "exec"), names)
    return names["_calculate_rewards"]


def by_trl(function: Callable[..., Any], of: list[Prompt], *, conversational: bool = True) -> list[float]:
    """The same prompts and samples, asked as TRL's trainer does."""
    rows = [
        {"prompt": [dict(m) for m in p.messages] if conversational else p.text, **p.meta} for p in of for _ in range(2)
    ]
    answers = [[{"role": "assistant", "content": t}] if conversational else t for t in ANSWERS]
    ids = [s.token_ids[2:].tolist() for s in samples()]
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        reward_funcs=[function],
        reward_processing_classes=[None],
        reward_func_names=["function"],
        state=None,
        environments=None,
        _log_completion_extra=lambda column, values: None,
        _log_metric=lambda name, value: None,
    )
    found = trls_own_method()(trainer, rows, [r["prompt"] for r in rows], answers, ids)
    return [float(v) for v in found[:, 0]]


def _same(ours: list[Score | Unscored], theirs: list[float]) -> bool:
    """TRL writes nan for None, and single precision."""
    mine = [o.value if isinstance(o, Score) else float("nan") for o in ours]
    return mine == pytest.approx(theirs, rel=1e-6, nan_ok=True)


def test_trls_own_functions_say_here_what_they_say_in_trl() -> None:
    from trl.rewards import accuracy_reward, get_repetition_penalty_reward, get_soft_overlong_punishment
    from trl.rewards import think_format_reward as think

    of = prompts(solution=["$3$", "no mathematics"], level=[1, 2])
    functions = [think, accuracy_reward, get_soft_overlong_punishment(5, 3), get_repetition_penalty_reward(2)]
    for function in functions:
        for unit in ("group", "batch", "sample"):
            found = asked(function, of, unit=unit, style="trl")
            assert _same(found, by_trl(function, of)), (function, unit, found)
    assert [o.value for o in asked(think, of)] == [1, 0, 0, 0]
    assert [isinstance(o, Unscored) for o in asked(accuracy_reward, of)] == [False, False, True, True]


@pytest.mark.parametrize("chat", [True, False])
def test_a_function_of_trls_gets_the_same_arguments(chat: bool) -> None:
    """Text and text where the prompt is plain, messages where it is a chat; every column; the types that the file has.
    TRL's trainer_state is the one thing that is not there."""
    seen: list[dict[str, Any]] = []

    def note(prompts, completions, completion_ids, **columns):
        seen.append({"prompts": prompts, "completions": completions, "completion_ids": completion_ids, **columns})
        return [0.5 if level > 1 else None for level in columns["level"]]

    of = prompts(chat=chat, level=[1, 2], tags=[["a"], []])
    ours, theirs = asked(note, of, unit="batch"), by_trl(note, of, conversational=chat)
    assert _same(ours, theirs)
    extra = {"trainer_state", "log_extra", "log_metric", "source"}
    mine, trls = ({k: v for k, v in s.items() if k not in extra} for s in seen)
    assert mine == trls
    assert seen[0].keys() == seen[1].keys() - {"trainer_state"} | {"source"}


def test_a_missing_answer_is_empty_for_trls_functions_too() -> None:
    """Beside prompts that have one, as in a file where only some rows do; a column that is there stays itself."""
    seen: list[list[str]] = []

    def note(completions, answer, **columns):
        seen.append(answer)
        return [0.0 for _ in answer]

    one, other = prompts(answer=["5", "6"])
    bare = dataclasses.replace(other, answer="", meta={k: v for k, v in other.meta.items() if k != "answer"})
    asked(note, [one, bare], unit="batch", style="trl")
    assert seen == [["5", "5", "", ""]]


def test_what_a_function_of_trls_logs_is_a_part() -> None:
    """Numbers of a column are each sample's, a metric is that of all samples of the call; text is not logged."""

    async def logs(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(c[0]["content"]) for c in completions])
        log_extra("text", ["x"] * len(completions))
        log_metric("size", len(completions))
        return [1.0] * len(completions)

    assert [dict(o.parts) for o in asked(logs)] == [{"size": 2.0, "length": float(len(t))} for t in ANSWERS]


def test_a_function_gets_no_keyword_that_it_does_not_take() -> None:
    def plain(completion_ids):
        return [float(len(ids)) for ids in completion_ids]

    assert [o.value for o in asked(plain)] == [2, 3, 4, 5]
