"""Calling conventions of reward functions, here and in other frameworks: their arguments and their results.

Every style starts from the same prompts and samples. Columns of the prompt file that are no argument of a style are
passed where the framework puts further columns: verl's extra_info, slime's metadata, TRL's keywords.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

from miles_like.rewards.outcome import TOTALS, each
from miles_like.types import Finish, Json, Prompt, Sample, Unit

Call = tuple[tuple[Any, ...], dict[str, Any]]  # positional arguments and keywords
# (what the function returned, number of samples, unit, reward.args) -> the result of each sample
Results = Callable[[Any, int, Unit, Mapping[str, Json]], list[object]]


class Arguments(Protocol):
    """Makes the arguments of one call; `args` is reward.args."""

    def __call__(
        self, prompts: Sequence[Prompt], samples: Sequence[Sample], *, unit: Unit, args: Mapping[str, Json]
    ) -> Call: ...


@dataclass(frozen=True, kw_only=True)
class Style:
    """One framework's convention."""

    units: tuple[Unit, ...]  # possible units of samples for one call; the first is the default
    arguments: Arguments
    results: Results


def _one_or_each(returned: Any, n: int, unit: Unit, args: Mapping[str, Json]) -> list[object]:
    return [returned] if unit is Unit.SAMPLE else each(returned, n)


def _each(returned: Any, n: int, unit: Unit, args: Mapping[str, Json]) -> list[object]:
    return each(returned, n)


def response_ids(prompt: Prompt, sample: Sample) -> list[int]:
    """All tokens after the prompt, including those of an environment."""
    return [int(t) for t in sample.token_ids[len(prompt.token_ids) :].tolist()]


# ours


def _own(prompts: Sequence[Prompt], samples: Sequence[Sample], *, unit: Unit, args: Mapping[str, Json]) -> Call:
    if unit is Unit.SAMPLE:
        return (prompts[0], samples[0]), {}
    return (prompts[0] if unit is Unit.GROUP else list(prompts), list(samples)), {}


# ours, of one argument: reward(sample) -> float


@dataclass(frozen=True, kw_only=True)
class RewardSample:
    """What a reward function with the one parameter `sample` gets."""

    prompt: str  # text, with the chat template's markers
    response: str  # text after the prompt, with that of an environment
    answer: str  # the row's; "" where it has none
    messages: Sequence[Mapping[str, str]]  # role and content of each, if the prompt comes from a chat template
    meta: Mapping[str, Json]  # the row's other columns
    finish: Finish  # STOP: the response has ended; LENGTH: it was cut at the token limit
    tokens: int  # of the response, without an environment's
    sample: Sample  # with token ids and log-probabilities


def _sample(prompts: Sequence[Prompt], samples: Sequence[Sample], *, unit: Unit, args: Mapping[str, Json]) -> Call:
    (prompt,), (sample,) = prompts, samples
    given = RewardSample(
        prompt=prompt.text,
        response=sample.text,
        answer=prompt.answer,
        messages=prompt.messages,
        meta=prompt.meta,
        finish=sample.finish,
        tokens=sample.response_len,
        sample=sample,
    )
    return (given,), {}


# verl: compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}


def _verl(prompts: Sequence[Prompt], samples: Sequence[Sample], *, unit: Unit, args: Mapping[str, Json]) -> Call:
    (prompt,), (sample,) = prompts, samples
    extra = prompt.meta.get("extra_info")
    return (), {
        "data_source": prompt.meta.get("data_source", prompt.source),
        "solution_str": sample.text,
        "ground_truth": prompt.answer,
        "extra_info": dict(extra if isinstance(extra, Mapping) else prompt.meta),
    }


def _verl_result(returned: Any, n: int, unit: Unit, args: Mapping[str, Json]) -> list[object]:
    if isinstance(returned, Mapping) and TOTALS[0] not in returned:
        raise ValueError(
            f"it returned a dict with the keys {', '.join(map(str, returned))}, expected {TOTALS[0]!r} too"
        )
    return [returned]


# slime and Miles: async custom_rm(args, sample) -> float | dict; with --group-rm (args, samples) -> list


class SlimeStatus(enum.Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


_STATUS = {
    Finish.STOP: SlimeStatus.COMPLETED,
    Finish.LENGTH: SlimeStatus.TRUNCATED,
    Finish.ABORT: SlimeStatus.ABORTED,
}


@dataclass(kw_only=True)
class SlimeSample:
    """The part of slime's Sample that a reward function reads. It is a copy, so the function may write to it."""

    Status = SlimeStatus
    index: int
    prompt: str
    tokens: list[int]  # prompt and response
    response: str
    response_length: int
    label: str
    loss_mask: list[int]  # of the response
    rollout_log_probs: list[float]  # of the response
    weight_versions: list[str]
    status: SlimeStatus
    metadata: dict[str, Any]
    reward: float | dict[str, Any] | None = None

    @property
    def effective_response_length(self) -> int:
        return sum(self.loss_mask)


def _slime_sample(prompt: Prompt, sample: Sample) -> SlimeSample:
    p = len(prompt.token_ids)
    return SlimeSample(
        index=sample.index,
        prompt=prompt.text,
        tokens=[int(t) for t in sample.token_ids.tolist()],
        response=sample.text,
        response_length=len(sample.token_ids) - p,
        label=prompt.answer,
        loss_mask=sample.loss_mask[p:].int().tolist(),
        rollout_log_probs=sample.logprobs[p:].tolist(),
        weight_versions=[str(v.version) for v in sample.versions],
        status=_STATUS[sample.finish],
        metadata=dict(column if isinstance(column := prompt.meta.get("metadata"), Mapping) else prompt.meta),
    )


def _slime(prompts: Sequence[Prompt], samples: Sequence[Sample], *, unit: Unit, args: Mapping[str, Json]) -> Call:
    converted = [_slime_sample(p, s) for p, s in zip(prompts, samples, strict=True)]
    return (SimpleNamespace(**args), converted[0] if unit is Unit.SAMPLE else converted), {}


def _slime_results(returned: Any, n: int, unit: Unit, args: Mapping[str, Json]) -> list[object]:
    """The reward of a dict is its key reward.args.reward_key, as with slime's --reward-key."""
    results, key = _one_or_each(returned, n, unit, args), args.get("reward_key")
    if key is None:
        return results
    without = [r for r in results if isinstance(r, Mapping) and key not in r]
    if without:
        raise ValueError(f"it returned {without[0]!r}, which has no {key!r} (reward.args.reward_key)")
    return [
        {**{k: v for k, v in r.items() if k != key}, TOTALS[0]: r[key]} if isinstance(r, Mapping) else r
        for r in results
    ]


# TRL: reward_func(prompts, completions, completion_ids, **columns) -> list[float | None]


@dataclass
class Logged:
    """The values that a TRL reward function passed to `log_metric` and `log_extra`."""

    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)

    def metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def extra(self, column: str, values: Sequence[Any]) -> None:
        self.columns[column] = list(values)


def _trl(prompts: Sequence[Prompt], samples: Sequence[Sample], *, unit: Unit, args: Mapping[str, Json]) -> Call:
    """Prompts and completions are lists of messages with data.template = "chat", else text."""
    chat = bool(prompts[0].messages)
    columns: dict[str, list[Any]] = {
        key: [p.meta.get(key) for p in prompts] for key in dict.fromkeys(k for p in prompts for k in p.meta)
    }
    columns["answer"] = [p.meta.get("answer", p.answer) for p in prompts]
    columns.setdefault("source", [p.source for p in prompts])
    return (), {
        **{k: v for k, v in columns.items() if k not in ("prompt", "completion", "completion_ids")},
        "prompts": [[dict(m) for m in p.messages] if chat else p.text for p in prompts],
        "completions": [[{"role": "assistant", "content": s.text}] if chat else s.text for s in samples],
        "completion_ids": [response_ids(p, s) for p, s in zip(prompts, samples, strict=True)],
    }


# OpenRLHF: reward_func(queries, prompts, labels) -> {"rewards": T, "scores": T, "extra_logs": {name: T}} | T


def _openrlhf(prompts: Sequence[Prompt], samples: Sequence[Sample], *, unit: Unit, args: Mapping[str, Json]) -> Call:
    queries = [p.text + s.text for p, s in zip(prompts, samples, strict=True)]
    return (queries, [p.text for p in prompts], [p.answer for p in prompts]), {}


def _openrlhf_results(returned: Any, n: int, unit: Unit, args: Mapping[str, Json]) -> list[object]:
    """The score is `rewards`; `scores` and `extra_logs` are parts, and a single number in them is that of every
    sample."""
    if not isinstance(returned, Mapping):
        return each(returned, n)
    if "rewards" not in returned:
        raise ValueError(f"it returned a dict with the keys {', '.join(map(str, returned))}, expected 'rewards' too")
    rewards = each(returned["rewards"], n)
    logs = {"scores": returned.get("scores"), **(returned.get("extra_logs") or {})}
    parts = {k: _for_each(v, n) for k, v in logs.items() if v is not None and not isinstance(v, str)}
    return [{**{k: v[i] for k, v in parts.items()}, TOTALS[0]: rewards[i]} for i in range(n)]


def _for_each(value: Any, n: int) -> list[object]:
    one = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return [value] * n if one else each(value, n)


_ANY = (Unit.SAMPLE, Unit.GROUP, Unit.BATCH)
STYLES: dict[str, Style] = {
    "own": Style(units=_ANY, arguments=_own, results=_one_or_each),
    "sample": Style(units=(Unit.SAMPLE,), arguments=_sample, results=_one_or_each),
    "verl": Style(units=(Unit.SAMPLE,), arguments=_verl, results=_verl_result),
    "slime": Style(units=(Unit.SAMPLE, Unit.GROUP), arguments=_slime, results=_slime_results),
    "trl": Style(units=(Unit.GROUP, Unit.SAMPLE, Unit.BATCH), arguments=_trl, results=_each),
    # unit SAMPLE first: OpenRLHF's agents call the function with lists of one
    "openrlhf": Style(units=_ANY, arguments=_openrlhf, results=_openrlhf_results),
}

_FIRST_TWO: dict[tuple[str, ...], tuple[str, Unit]] = {
    ("prompt", "sample"): ("own", Unit.SAMPLE),
    ("prompt", "samples"): ("own", Unit.GROUP),
    ("prompts", "samples"): ("own", Unit.BATCH),
    ("args", "sample"): ("slime", Unit.SAMPLE),
    ("args", "samples"): ("slime", Unit.GROUP),
}


def recognised(function: Callable[..., object]) -> tuple[str, Unit] | None:
    """The style and unit that the parameter names imply; None where they imply none."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:
        return None  # written in C, without a signature to inspect
    names = list(parameters)
    if names == ["sample"]:
        return "sample", Unit.SAMPLE
    if (first := _FIRST_TWO.get(tuple(names[:2]))) is not None:
        return first
    for style, words in (("verl", {"solution_str", "ground_truth"}), ("openrlhf", {"queries", "labels"})):
        if words <= set(names):
            return style, STYLES[style].units[0]
    if {"completions", "completion_ids"} & set(names):
        return "trl", STYLES["trl"].units[0]
    return None
