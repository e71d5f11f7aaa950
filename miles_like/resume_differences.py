"""What a resumed run may change in its configuration: silently, said in a line, or not at all.

A key that nobody thought of here is said in a line: neither is a run stopped for it, nor does it go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from miles_like.types import Json

# how long it goes on, what is kept and measured, and where it runs: no step is another one for it
SILENT = (
    "cache_dir",
    "train.steps",
    "checkpoint.*",
    "eval.*",
    "convert.*",
    "cluster.*",
    "parallel.*",  # checkpoints are read in any layout
    "model.config",
    "data.eval",
    "data.decontaminate",
    "mismatch.*",
    "publish.*",
    "rollout.servers",
    "rollout.port",
    "rollout.*_timeout_s",
    "rollout.prompts_per_request",
    "rollout.embedded.threads",
    "rollout.embedded.max_running_requests",
    "rollout.embedded.max_total_tokens",
    "rollout.sglang.*",
)
# what is saved is of these: another prompt order, other weights, groups of another size or under another bound
REFUSED = (
    "seed",
    "model.*",
    "data.*",
    "lora.*",
    "algorithm.name",
    "algorithm.advantage",
    "train.groups_per_step",
    "train.samples_per_group",
    "train.steps_per_rollout",
    "buffer.max_staleness",
    "buffer.lockstep",
    "buffer.old_tokens",
)


def resume_differences(saved: Json, now: Json) -> list[str]:
    """One sentence for each key whose change makes the run another one than it was begun as.

    saved, now: a run's whole configuration as `model_dump(mode="json")` gives it. Raises ValueError naming the
    first key that may not change, with both values.
    """
    assert isinstance(saved, Mapping) and isinstance(now, Mapping)
    was, to = dict(_flat(saved)), dict(_flat(now))
    changed = [k for k in sorted(was.keys() | to.keys()) if was.get(k) != to.get(k) and not _among(k, SILENT)]
    for key in changed:
        if _among(key, REFUSED):
            back = f"set {key} back" if was.get(key) is None else f"resume with --set {key}={_text(was[key])}"
            raise ValueError(
                f"{key} was {_text(was.get(key))} when the checkpoint was saved and is {_text(to.get(key))} now: the "
                f"run cannot go on with another one; {back}, or begin a new run with another --run-dir"
            )
    return [
        f"{key} was {_text(was.get(key))} and is {_text(to.get(key))} from here on: not the run that was begun"
        for key in changed
    ]


def _among(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, p) for p in patterns)


def _flat(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys; a section that is not given has no keys, and a key that is None is as good as not given."""
    for key, one in value.items():
        if isinstance(one, Mapping):
            yield from _flat(one, f"{before}{key}.")
        elif one is not None:
            yield f"{before}{key}", one


def _text(value: Any) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
