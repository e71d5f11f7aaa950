"""The runs of the loop on stock SGLang: settings that differ, and rows in which every two of their values meet.

Other values of a setting (another path, another engine) are added to FACTORS; the rows follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tests.support.covering import Row, covering_rows

STEPS, KILLED_AFTER, SAVED_EVERY, EVALUATED_EVERY = 20, 12, 5, 4
FACTORS: Mapping[str, Sequence[Any]] = {
    "shape": ("deepseek", "qwen"),
    "path": ("tensor", "disk"),
    "pause": ("abort", "retract", "in_place"),
    "staleness": (0, 2),
    "partial": (False, True),  # samples go on across a publication after which their first tokens are too old
    "over_sampling": (False, True),
    "evaluation": (False, True),
    "killed": (False, True),  # and resumed
    "servers": (1, 2),
    "tp": (1, 2),
}
HEADER = ("shape", "path", "pause", "staleness", "partial", "over-sampling", "evaluation", "killed", "servers", "tp")


def allowed(row: Row) -> bool:
    """Whether a run can have these settings: with R3 a stock server may not retract samples in flight, samples become
    too old only where more groups are in flight than can be trained, and whole steps are sampled ahead in lockstep."""
    retracts = row["pause"] == "retract"
    if row["partial"]:
        return bool(row["over_sampling"]) and not retracts
    return not (retracts and row["staleness"] and row["over_sampling"])


@cache
def rows() -> tuple[Row, ...]:
    return tuple(covering_rows(FACTORS, allowed))


def loop_settings(row: Row) -> list[str]:
    """The settings of the loop, whose combinations the configuration may refuse."""
    staleness, partial = row["staleness"], row["partial"]
    out = [f"buffer.max_staleness={staleness}", f"publish.pause_mode={row['pause']}", f"publish.path={row['path']}"]
    out.append("replay.mode=r3")
    if partial:
        out.append("buffer.old_tokens=mask")
    if row["over_sampling"]:  # groups in flight beyond a step's, in steps
        out.append(f"buffer.over_sampling={staleness + 0.5 if partial else 1.0 if staleness else 0.5}")
    if row["pause"] == "retract" and staleness:
        out.append("buffer.lockstep=true")  # a publication waits for the samples in flight
    return out


def in_flight(row: Row) -> bool:
    """Whether samples are in flight at a publication, so that they have tokens of several versions."""
    return bool(row["partial"]) or (row["staleness"] > 0 and row["pause"] != "retract")


def settings(row: Row, steps: int = STEPS) -> list[str]:
    """All settings of the row, without those of the model and of SGLang's interpreter."""
    out = [*loop_settings(row), f"rollout.servers={row['servers']}", f"rollout.sglang.tp_size={row['tp']}"]
    if row["tp"] > 1:
        out.append("rollout.env={SGLANG_CPU_OMP_THREADS_BIND='0|1'}")  # ranks on one NUMA node
    out += [f"eval.every={EVALUATED_EVERY if row['evaluation'] else 0}", "eval.max_prompts=4"]
    out += [f"checkpoint.every={SAVED_EVERY}", f"train.steps={steps}"]
    # where groups should be in flight still when others are trained, answers have very different lengths
    tokens = 160 if in_flight(row) else 48
    out += ["train.groups_per_step=4", "train.samples_per_group=2", f"rollout.max_new_tokens={tokens}"]
    out += ["publish.bucket_bytes=65536", "optimizer.lr=3e-4", "optimizer.warmup_steps=0"]
    # checks of weights before every step; a reward that a model of random weights gets different values of
    out += ["mismatch.checksums_every=1", "mismatch.check_prompts=2", "reward.name=tests.support.local_run:low_tokens"]
    return out


def page() -> str:
    """The table of docs/engine.md."""
    lines = [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}"]
    for row in rows():
        shown = [("yes" if v else "no") if isinstance(v, bool) else f"`{v}`" for v in row.values()]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)
