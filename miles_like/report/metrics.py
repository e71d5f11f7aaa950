"""Metrics computed from the groups of a step and of evaluations. docs/metrics.md defines every key.

Letters: G samples a prompt.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from miles_like.records import SampleRecord
from miles_like.types import ADVANTAGES, TRAINER_LOGPROBS, Finish, Sample, SampleGroup

RIGHT = 1.0  # the reward from which an answer counts as right

# metrics that differ between two runs with the same bits
TIMINGS = ("wall_s", "perf/", "sync/seconds", "rollout/environment_s/", "timing_s/")  # the last: verl's (aliases.py)


def rollout_metrics(groups: Sequence[SampleGroup], *, version: int) -> dict[str, float]:
    """Metrics of scored groups. `version`: of the weights that they are about to train.

    Raises ValueError for no group, or a sample without reward.
    """
    samples = [s for g in groups for s in g.samples]
    episodes, lengths = [s for g in groups for s in g.episodes], _lengths(groups)
    if not samples:
        raise ValueError(f"0 samples in {len(groups)} groups: nothing to measure")
    rewards = [g.rewards for g in groups]
    flat = [r for g in rewards for r in g]
    staleness = [version - g.oldest_version for g in groups]
    return {
        "rollout/reward/mean": statistics.fmean(flat),
        "rollout/reward/std": statistics.pstdev(flat),
        "rollout/accuracy": statistics.fmean(r >= RIGHT for r in flat),
        **{f"rollout/reward/{part}/mean": mean for part, mean in _part_means(episodes).items()},
        "rollout/len/mean": statistics.fmean(lengths),
        "rollout/empty_frac": statistics.fmean(n == 0 for n in lengths),
        "rollout/truncated_frac": statistics.fmean(s.finish is Finish.LENGTH for s in samples),
        "rollout/zero_std_group_frac": statistics.fmean(len(set(r)) < 2 for r in rewards),
        "async/staleness/mean": statistics.fmean(staleness),
        "async/staleness/max": float(max(staleness)),
    }


def _lengths(groups: Sequence[SampleGroup]) -> list[int]:
    """Response tokens of each episode."""
    return [sum(s.response_len for s in rows) for g in groups for rows in g.rows]


def speed_metrics(
    groups: Sequence[SampleGroup],
    *,
    rollout_s: float | None,
    train_s: float,
    flops: Callable[[Sequence[int], int], float] | None = None,
    peak: float | None = None,
) -> dict[str, float]:
    """Tokens per second of a step: sampled in `rollout_s` (None: no rollout), and trained in `train_s`, prompts
    included.

    With `flops(input lengths, loss tokens)` of a step and `peak`, FLOP/s of all trainer ranks together, also the model
    FLOPs utilization: flops / (train_s * peak).
    """
    samples = [s for g in groups for s in g.samples]
    sampled, inputs = sum(s.response_len for s in samples), [s.length - 1 for s in samples]
    out = {} if rollout_s is None else {"perf/tokens_per_s_rollout": sampled / rollout_s}
    out["perf/tokens_per_s_train"] = sum(inputs) / train_s
    if flops is not None and peak is not None:
        trained = [n for n, s in zip(inputs, samples, strict=True) if s.response_len]
        out["perf/mfu"] = flops(trained, sampled) / (train_s * peak)
    return out


def pass_at_k(*, n: int, correct: int, k: int) -> float:
    """Probability that at least one of k samples, drawn without replacement from n with `correct` right ones, is right.

    1 - C(n - c, k) / C(n, k), the unbiased estimator of HumanEval (arXiv:2107.03374, eq. 1). Raises ValueError unless
    1 <= k <= n and 0 <= correct <= n.
    """
    if not (1 <= k <= n and 0 <= correct <= n):
        raise ValueError(f"pass@{k} of {n} samples with {correct} right: expected 1 <= k <= n and 0 <= right <= n")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def powers_up_to(k: int) -> list[int]:
    """1, 2, 4, ... and k."""
    return sorted({1 << i for i in range(k.bit_length())} | {k})


def eval_metrics(groups: Sequence[SampleGroup], *, name: str, k: int, right: float = RIGHT) -> dict[str, float]:
    """Metrics of `k` answers to each prompt: `eval/{name}/avg@k`, the mean over prompts of the mean reward of their
    answers, when k > 1 `pass@j` for j = 1, 2, 4, ... k, and for each part of the reward `reward/{part}/mean`, over all
    scored answers.

    Unscored answers are ignored; a prompt enters pass@j if at least j of its answers were scored, and a metric without
    any prompt is omitted. An answer is right at a reward of at least `right`. Raises ValueError for no group, or one of
    more than k samples.
    """
    rewards = [[s.reward for s in g.episodes if s.reward is not None] for g in groups]
    most = max((len(r) for r in rewards), default=None)
    if most is None or most > k:
        raise ValueError(
            f"eval set {name!r} has {len(groups)} groups of up to {most} answers: expected groups of up to {k}"
        )
    out = {}
    if most:
        out[f"eval/{name}/avg@{k}"] = statistics.fmean(statistics.fmean(r) for r in rewards if r)
    for j in powers_up_to(k) if k > 1 else ():
        counts = [(len(r), sum(x >= right for x in r)) for r in rewards if len(r) >= j]
        if counts:
            out[f"eval/{name}/pass@{j}"] = statistics.fmean(pass_at_k(n=n, correct=c, k=j) for n, c in counts)
    scored = [s for g in groups for s in g.episodes if s.reward is not None]
    return out | {f"eval/{name}/reward/{part}/mean": mean for part, mean in _part_means(scored).items()}


def _part_means(samples: Sequence[Sample]) -> dict[str, float]:
    """Part of the reward -> its mean over the samples that have it."""
    parts: dict[str, list[float]] = {}
    for s in samples:
        for name, value in s.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return {name: statistics.fmean(values) for name, values in parts.items()}


def write_rollouts(
    path: Path,
    groups: Sequence[SampleGroup],
    columns: Sequence[Sequence[Mapping[str, object]]] = (),
    *,
    append: bool = False,
) -> None:
    """Write one readable JSON object per sample, for people and for the page; replaces the file unless `append`.
    columns: further values of each sample of each group; empty: none. Advantages of tokens and the trainer's log-probs
    are written where they are streams of the sample."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a" if append else "w", encoding="utf-8") as out:
        for group, more in zip(groups, columns or [[{}] * len(g.samples) for g in groups], strict=True):
            for sample, own in zip(group.samples, more, strict=True):
                of_tokens = {
                    name: own[name] if name in own else sample.streams[name][sample.loss_mask].tolist()
                    for name in (ADVANTAGES, TRAINER_LOGPROBS)
                    if name in sample.streams or name in own
                }  # in this order wherever they are held
                out.write(json.dumps({**readable(group, sample), **of_tokens, **own}, ensure_ascii=False) + "\n")


def readable(group: SampleGroup, sample: Sample) -> dict[str, object]:
    """A sample as JSON, for people and for `verify`: prompt, response, reward, tokens and log-probs."""
    n = sample.response_len
    return {
        **brief(group, sample),
        "logprob_mean": float(sample.logprobs[sample.loss_mask].mean()) if n else None,
        "versions": [list(v) for v in sample.versions],
        "token_ids": sample.token_ids.tolist(),
        "loss_mask": sample.loss_mask.int().tolist(),
        "logprobs": sample.logprobs[sample.loss_mask].tolist(),  # of the loss tokens only
    }


def brief(group: SampleGroup, sample: Sample) -> dict[str, object]:
    """A sample as JSON without the values of its tokens; the response of one that a rollout worker holds is None."""
    return {
        "prompt_id": group.prompt.id,
        "index": sample.index,
        **({"row": sample.row} if sample.row else {}),
        "prompt": group.prompt.text,
        "response": None if isinstance(sample, SampleRecord) else sample.text,
        "answer": group.prompt.answer,
        "reward": sample.reward,
        "reward_parts": dict(sample.reward_parts),
        "finish": sample.finish.value,
        "tokens": sample.response_len,
        **({"spans": [asdict(span) for span in sample.spans]} if sample.spans else {}),
    }
