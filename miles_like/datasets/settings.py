"""What the data commands read of a run's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_like.config.load import checked, parse_override, read_tree
from miles_like.config.sections.eval import NAME, EvalConfig
from miles_like.config.sections.reward import RewardConfig
from miles_like.sandbox.config import SandboxConfig
from miles_like.section import Section
from rollout.prompts.config import DataConfig


class DataTools(Section):
    """The sections of a run's configuration that the data commands read."""

    data: DataConfig
    reward: RewardConfig | None = None  # None: no reward is named, and answers are not scored
    sandbox: SandboxConfig = SandboxConfig()
    eval: EvalConfig = EvalConfig()


def read_settings(path: Path | None, overrides: Sequence[str]) -> DataTools:
    """A run's configuration, if `path` names one, with `overrides`. Raises ValueError for an invalid one, and for an
    override of a section that is not read."""
    known = DataTools.model_fields
    for text in overrides:
        if next(iter(parse_override(text))) not in known:
            raise ValueError(f"--set {text}: the data commands read only the sections {', '.join(known)}: remove it")
    tree = {k: v for k, v in read_tree(path, overrides).items() if k in known}
    given = tree.get("data", {})
    tree["data"] = given if given.get("sources") else {"train": "", **given}
    if path is not None:
        tree.setdefault("reward", {})  # a run without the section has a reward too
    return checked(DataTools, tree, "--set" if path is None else str(path))


def eval_files(settings: DataTools, against: Sequence[str]) -> Mapping[str, str]:
    """Name -> file of each eval set: those of `--against [NAME=]FILE`, else those of the configuration. Raises
    ValueError for a name that is given twice."""
    if not against:
        return {s.name: s.path for s in settings.eval.all_sets(settings.data.eval)}
    out: dict[str, str] = {}
    for text in against:
        before, eq, after = text.partition("=")
        name, path = (before, after) if eq and NAME.fullmatch(before) else (Path(text.partition(":")[0]).stem, text)
        if name in out:
            raise ValueError(
                f"--against {text}: the name {name!r} is already used for {out[name]}: choose a different name "
                "with --against NAME=FILE"
            )
        out[name] = path
    return out
