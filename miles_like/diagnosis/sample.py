"""The whole life of a sample: prompt, versions, routes' agreement, reward and its parts, advantage, share of the loss,
and where its time went."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from miles_like.config.load import load_config
from miles_like.limits.regular_files import MIB, check_inside, parse_json, read_own, read_text
from miles_like.protocols import Algorithm
from miles_like.report.traces.chrome import read_trace
from miles_like.report.traces.parts import TracedSpan
from miles_like.report.traces.writer import trace_files
from miles_like.run.setup.model_plan import run_algorithm
from miles_like.run.verify import ROLLOUTS_BYTES, kept_sample
from miles_like.types import Aggregation, Prompt, Sample, SampleGroup

_LEDGER_BYTES = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A sample in one of the steps that trained it."""

    step: int
    row: Mapping[str, Any]  # of rollouts/step_N.jsonl
    rewards: tuple[float, ...]  # of its group, in the order of the file
    advantage: float | None  # mean over its loss tokens; None: it follows from more than rewards
    loss_share: float | None  # of the step's sum of |advantage| x weight of a sample in the loss
    agreement: float | None  # of the routes of the step; None: none are replayed
    spans: tuple[TracedSpan, ...]  # that name it


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """key: PROMPT_ID/INDEX. discarded: (step, reason, samples) of its prompt's groups, from the ledger."""

    key: str
    trained: tuple[Trained, ...]
    discarded: tuple[tuple[int, str, int], ...]
    why_no_advantage: str | None  # None: it is known


def life_of(run_dir: Path, key: str, metrics: Sequence[Mapping[str, float]]) -> Life:
    """Raises ValueError for a key that no sample of the run has."""
    prompt_id, _, index = key.rpartition("/")
    if not prompt_id or not index.isdecimal():
        raise ValueError(f"--sample {key!r} is not PROMPT_ID/INDEX: take one of a rollouts/step_N.jsonl, as train-17/0")
    algorithm, why = _algorithm(run_dir)
    spans = [s for path in trace_files(run_dir) for s in read_trace(path) if key in s.args.get("samples", ())]
    by_step = {int(row["step"]): row for row in metrics}
    found = []
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"), key=_step_of):
        step = _step_of(path)
        rows = _rows(path, run_dir, prompt_id)
        if rows is None:
            continue
        mine = [i for i, r in enumerate(rows) if (r.get("prompt_id"), r.get("index")) == (prompt_id, int(index))]
        advantages = None if algorithm is None else _advantages(algorithm, rows, str(path))
        shares = None if advantages is None or algorithm is None else _loss_shares(algorithm, rows, advantages)
        window = [s for s in spans if _is_of(s, step, rows[mine[0]])] if mine else []
        agreement = by_step.get(step, {}).get("routing/expert_agreement")
        for i in mine:
            found.append(
                Trained(
                    step=step,
                    row=rows[i],
                    rewards=tuple(float(r["reward"]) for r in rows if r["prompt_id"] == prompt_id),
                    advantage=None if advantages is None else advantages[i],
                    loss_share=None if shares is None else shares[i],
                    agreement=None if agreement is None or math.isnan(agreement) else agreement,
                    spans=tuple(sorted(window, key=lambda s: s.start)),
                )
            )
    discarded = _discarded(run_dir, prompt_id)
    if not found and not discarded:
        raise ValueError(f"no step of {run_dir} has a sample {key}: take a key of its rollouts/step_N.jsonl")
    return Life(key=key, trained=tuple(found), discarded=discarded, why_no_advantage=why)


def _step_of(path: Path) -> int:
    digits = path.stem.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def _rows(path: Path, run_dir: Path, prompt_id: str) -> list[dict[str, Any]] | None:
    """All samples of a step; None where the prompt is not among them, without parsing them."""
    check_inside(path, run_dir)
    text = read_text(path, ROLLOUTS_BYTES)
    if prompt_id not in text:
        return None
    rows = [parse_json(line) for line in text.splitlines() if line.strip()]
    return rows if any(row.get("prompt_id") == prompt_id for row in rows) else None


def _algorithm(run_dir: Path) -> tuple[Algorithm | None, str | None]:
    """The run's, and why its advantages cannot be computed from what the run keeps; None: they can."""
    config = load_config(run_dir / "config.toml")
    if config.servers is None:
        return None, "the run trains on given examples, which have no advantage"
    algorithm = run_algorithm(config)
    if needs := sorted(algorithm.needs):
        return None, f"advantages of algorithm.name = {config.algorithm.name!r} need {', '.join(needs)}, not kept"
    if config.algorithm.parts.shuffle_advantages:
        return None, "algorithm.shuffle_advantages = true exchanges advantages between samples"
    return algorithm, None


def _advantages(algorithm: Algorithm, rows: Sequence[Mapping[str, Any]], where: str) -> list[float] | None:
    """One for each row: the mean over its loss tokens."""
    groups: dict[str, list[Sample]] = {}
    order: list[tuple[str, int]] = []
    for row in rows:
        sample = replace(kept_sample(row, where), reward=float(row["reward"]))
        of = groups.setdefault(sample.prompt_id, [])
        order.append((sample.prompt_id, len(of)))
        of.append(sample)
    made = [
        SampleGroup(prompt=Prompt(id=name, token_ids=(0,), answer=""), samples=tuple(of)) for name, of in groups.items()
    ]
    values = dict(zip(groups, algorithm.advantages(made), strict=True))
    return [_mean(values[name][i], groups[name][i]) for name, i in order]


def _mean(value: float | Tensor, sample: Sample) -> float:
    if not isinstance(value, Tensor):
        return float(value)
    return float(value[sample.loss_mask].mean()) if sample.response_len else 0.0


def _loss_shares(algorithm: Algorithm, rows: Sequence[Mapping[str, Any]], advantages: Sequence[float]) -> list[float]:
    """Of each row: |advantage| times the weight of the sample in the step's loss, over the sum of these."""
    tokens = [int(row["tokens"]) for row in rows]
    by_prompt: dict[str, int] = {}
    for row, n in zip(rows, tokens, strict=True):
        by_prompt[row["prompt_id"]] = by_prompt.get(row["prompt_id"], 0) + n
    weights = []
    for row, n in zip(rows, tokens, strict=True):
        match algorithm.aggregation:
            case Aggregation.SEQUENCE_MEAN:
                weights.append(float(n > 0))
            case Aggregation.PROMPT_MEAN:
                weights.append(n / max(by_prompt[row["prompt_id"]], 1))
            case _:
                weights.append(float(n))
    parts = [abs(a) * w for a, w in zip(advantages, weights, strict=True)]
    total = sum(parts)
    return [part / total if total else 0.0 for part in parts]


def _is_of(span: TracedSpan, step: int, row: Mapping[str, Any]) -> bool:
    """Whether a span that names the sample is of this step: by its step or version, or by the versions that sampled
    it, since a prompt is sampled again in each epoch."""
    if "step" in span.args:
        return bool(span.args["step"] == step)
    if span.name == "train":
        return bool(span.args.get("version") == step)
    versions = {v[0] for v in row.get("versions", ())}
    known = span.args.get("versions")
    return known is None or bool(versions & set(known)) or not versions


def _discarded(run_dir: Path, prompt_id: str) -> tuple[tuple[int, str, int], ...]:
    path = run_dir / "ledger.jsonl"
    if not path.exists():
        return ()
    found = []
    for line in read_own(path, run_dir, _LEDGER_BYTES).decode("utf-8").splitlines():
        if prompt_id in line and (entry := parse_json(line)).get("prompt") == prompt_id:
            found += [(int(entry["step"]), str(why), int(n)) for why, n in entry.get("discarded", {}).items()]
    return tuple(found)
