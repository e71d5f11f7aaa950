"""`miles-like data recycle`: the hard prompts of a run as a file for another."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from miles_like.config.load import load_config
from miles_like.datasets.sampled.recycle import Recycled, last_visits, recycled
from miles_like.datasets.table import Table, read_table
from miles_like.pipeline.cache import fetched_model
from miles_like.run.setup.model_plan import run_tokenizer
from rollout.prompts.source import Tokenizer


def recycle_run(
    run_dir: Path, *, low: float, high: float, pass_at: float | None, tokenizer: Path | None
) -> tuple[Recycled, Sequence[Table]]:
    """The prompts of a run with a pass rate of `low` to `high` at their last visit, and the files that the run read.

    pass_at: reward of a sample that passes; None: that of the run's curriculum, else 1. tokenizer: Hugging Face
    directory, needed for rows without ids where the run's initial model was deleted. Raises
    ValueError for a directory without a run, and as `read_table` and `recycled`.
    """
    path = run_dir / "config.toml"
    if not path.is_file():
        raise ValueError(f"{run_dir} contains no run ({path} does not exist): pass the directory of a run")
    config = load_config(path)
    data, curriculum = config.data, config.data.curriculum
    if pass_at is None:
        pass_at = 1.0 if curriculum is None else curriculum.pass_at
    visits = last_visits(run_dir, pass_at)
    used: Tokenizer | None = None
    if tokenizer is not None:
        used = run_tokenizer(tokenizer)
    else:
        with contextlib.suppress(ValueError):  # ids of rows that have one, or a plain text, need none
            used = run_tokenizer(fetched_model(config, run_dir))
    tables = [read_table(s.path, data.for_source(s), used) for s in data.train_sources().values()]
    return recycled(tables, visits, low=low, high=high), tables
