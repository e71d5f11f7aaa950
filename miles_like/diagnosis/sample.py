"""The whole life of a sample: prompt, versions, routes' agreement, reward and its parts, advantage, share of the loss,
and where its time went."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles_like.config.load import load_config
from miles_like.limits.regular_files import MIB, check_inside, json_lines, parse_json, read_own, read_text
from miles_like.report.traces.chrome import read_trace
from miles_like.report.traces.parts import TracedSpan
from miles_like.report.traces.writer import trace_files
from miles_like.run.setup.model_plan import run_algorithm
from miles_like.run.verify import ROLLOUTS_BYTES
from miles_like.types import ADVANTAGES, AGREEMENT, Aggregation

_LEDGER_BYTES = 1024 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A sample in one of the steps that trained it."""

    step: int
    row: Mapping[str, Any]  # of rollouts/step_N.jsonl
    rewards: tuple[float, ...]  # of its group, in the order of the file
    advantage: float | None  # mean over its loss tokens; None: not written
    loss_share: float | None  # of the step's sum of |advantage| x weight of a sample in the loss
    agreement: float | None  # share of its recorded experts that the trainer's routers choose too; None: not measured
    of_step: float | None  # the same of all samples of the step
    spans: tuple[TracedSpan, ...]  # that name it


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """key: PROMPT_ID/INDEX. discarded: (step, reason, samples) of its prompt's groups, from the ledger."""

    key: str
    trained: tuple[Trained, ...]
    discarded: tuple[tuple[int, str, int], ...]


def life_of(run_dir: Path, key: str, metrics: Sequence[Mapping[str, float]]) -> Life:
    """Raises ValueError for a key that no sample of the run has."""
    prompt_id, _, index = key.rpartition("/")
    if not prompt_id or not index.isdecimal():
        raise ValueError(f"--sample {key!r} is not PROMPT_ID/INDEX: take one of a rollouts/step_N.jsonl, as train-17/0")
    aggregation = run_algorithm(load_config(run_dir / "config.toml")).aggregation
    spans = [s for path in trace_files(run_dir) for s in read_trace(path) if key in s.args.get("samples", ())]
    by_step = {int(row["step"]): row for row in metrics}
    found = []
    for path in sorted((run_dir / "rollouts").glob("step_*.jsonl"), key=_step_of):
        step = _step_of(path)
        rows = _rows(path, run_dir, prompt_id)
        if rows is None:
            continue
        mine = [i for i, r in enumerate(rows) if (r.get("prompt_id"), r.get("index")) == (prompt_id, int(index))]
        advantages = [own for row in rows if (own := _advantages(row)) is not None]
        known = len(advantages) == len(rows)
        shares = _loss_shares(aggregation, rows, advantages) if known else None
        window = [s for s in spans if _is_of(s, step, rows[mine[0]])] if mine else []
        of_step = by_step.get(step, {}).get("routing/expert_agreement")
        for i in mine:
            found.append(
                Trained(
                    step=step,
                    row=rows[i],
                    rewards=tuple(float(r["reward"]) for r in rows if r["prompt_id"] == prompt_id),
                    advantage=statistics.fmean(advantages[i] or [0.0]) if known else None,
                    loss_share=None if shares is None else shares[i],
                    agreement=rows[i].get(AGREEMENT),
                    of_step=None if of_step is None or math.isnan(of_step) else of_step,
                    spans=tuple(sorted(window, key=lambda s: s.start)),
                )
            )
    discarded = _discarded(run_dir, prompt_id)
    if not found and not discarded:
        raise ValueError(f"no step of {run_dir} has a sample {key}: take a key of its rollouts/step_N.jsonl")
    return Life(key=key, trained=tuple(found), discarded=discarded)


def _step_of(path: Path) -> int:
    digits = path.stem.removeprefix("step_")
    return int(digits) if digits.isdecimal() else -1


def _rows(path: Path, run_dir: Path, prompt_id: str) -> list[dict[str, Any]] | None:
    """All samples of a step; None where the prompt is not among them, without parsing them."""
    check_inside(path, run_dir)
    text = read_text(path, ROLLOUTS_BYTES)
    if json.dumps(prompt_id, ensure_ascii=False) not in text:
        return None
    rows = [parse_json(line) for line in json_lines(text)]
    return rows if any(row.get("prompt_id") == prompt_id for row in rows) else None


def _advantages(row: Mapping[str, Any]) -> list[float] | None:
    """Of a sample's loss tokens, or one for all of them, as it was trained; None: a run of an earlier version."""
    value = row.get(ADVANTAGES)
    return [float(v) for v in value] if isinstance(value, list) else None if value is None else [float(value)]


def _loss_shares(
    aggregation: Aggregation, rows: Sequence[Mapping[str, Any]], advantages: Sequence[Sequence[float]]
) -> list[float]:
    """Of each row: the mean |advantage| of its tokens times its weight in the step's loss, over the sum of these."""
    tokens = [int(row["tokens"]) for row in rows]
    by_prompt, by_episode = Counter[str](), Counter[tuple[str, int]]()
    for row, n in zip(rows, tokens, strict=True):
        by_prompt[row["prompt_id"]] += n
        by_episode[row["prompt_id"], row["index"]] += n
    weights = []
    for row, n in zip(rows, tokens, strict=True):
        match aggregation:
            case Aggregation.SEQUENCE_MEAN:
                weights.append(n / max(by_episode[row["prompt_id"], row["index"]], 1))
            case Aggregation.PROMPT_MEAN:
                weights.append(n / max(by_prompt[row["prompt_id"]], 1))
            case _:
                weights.append(float(n))
    parts = [w * statistics.fmean(map(abs, of)) if of else 0.0 for of, w in zip(advantages, weights, strict=True)]
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
        if json.dumps(prompt_id) in line and (entry := parse_json(line)).get("prompt") == prompt_id:
            found += [(int(entry["step"]), str(why), int(n)) for why, n in entry.get("discarded", {}).items()]
    return tuple(found)
