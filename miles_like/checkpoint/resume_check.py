"""Which configuration keys a resumed run may change: silently, with a notice, or not at all.

Keys that match neither list below are changed with a notice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from miles_like.types import Json

# length of the run, what is kept and measured, and where it runs: these change no optimizer step
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
    "report.*",
    "alerts.*",
    "publish.*",
    "rollout.servers",
    "rollout.port",
    "rollout.*_timeout_s",
    "rollout.prompts_per_request",
    "rollout.embedded.threads",
    "rollout.embedded.tp_size",
    "rollout.embedded.ep_size",
    "rollout.embedded.max_running_requests",
    "rollout.embedded.max_total_tokens",
    "rollout.sglang.*",
    "rollout.vllm.*",
    "rollout.env.*",
    "trackers.*",
    "trace.*",
)
# the saved state depends on these: prompt order, weights, group size, staleness bound
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
    """One sentence for each changed key that is not in SILENT.

    saved, now: the whole configuration as `model_dump(mode="json")` returns it. Raises ValueError naming the first key
    that may not change, with both values.
    """
    assert isinstance(saved, Mapping) and isinstance(now, Mapping)
    was, to = dict(_flat(saved)), dict(_flat(now))
    changed = [k for k in sorted(was.keys() | to.keys()) if was.get(k) != to.get(k) and not _matches(k, SILENT)]
    for key in changed:
        if _matches(key, REFUSED):
            back = f"set {key} back" if was.get(key) is None else f"resume with --set {key}={_text(was[key])}"
            raise ValueError(
                f"{key} was {_text(was.get(key))} when the checkpoint was saved, but is now {_text(to.get(key))}, "
                f"which a resumed run cannot change: {back}, or start a new run with another --run-dir"
            )
    return [
        f"{key} was {_text(was.get(key))} and is {_text(to.get(key))} from here on: this changes the run"
        for key in changed
    ]


def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, p) for p in patterns)


def _flat(section: Mapping[str, Json], prefix: str = "") -> Iterator[tuple[str, Json]]:
    """(dotted key, value) pairs. Keys that are None are skipped: None is the same as not set."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


def _text(value: Json) -> str:
    return "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
