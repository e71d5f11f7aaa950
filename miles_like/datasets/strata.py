"""Answers that `miles-like eval --answers` wrote, by prompt, and the pass rates of the prompts."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from miles_like.datasets.table import Table
from miles_like.types import Finish
from rollout.prompts.curriculum import STRATA, stratum


class PassRate(NamedTuple):
    """The scored answers to a prompt, and how many of them passed."""

    passed: int
    scored: int

    @property
    def share(self) -> float:
        return self.passed / self.scored


class Answer(NamedTuple):
    """A scored answer to a prompt."""

    reward: float
    text: str | None  # None: the file does not have it
    ended: bool  # by an end token, not at the token limit


def json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of each line. Raises ValueError naming a line that is no object."""
    with path.open(encoding="utf-8") as opened:
        for n, line in enumerate(opened, 1):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if not isinstance(found, dict):
                raise ValueError(f"{path}, line {n}: expected one JSON object per line, as miles-like writes them")
            yield n, found


def scored_answers(path: Path, table: Table) -> Mapping[str, Sequence[Answer]]:
    """Prompt id -> its scored answers, of the prompts of the table that have some, in the order of the file.

    Of several eval sets in the file the one with the most prompts of the table; of its answers the sampled ones, where
    a prompt has any, else the greedy one. Raises ValueError for a file of another form, and where no answer is to a
    prompt of the table.
    """
    of: defaultdict[str, defaultdict[str, dict[str, list[Answer]]]] = defaultdict(lambda: defaultdict(dict))
    for n, line in json_lines(path):
        name, mode, prompt, reward = (line.get(k) for k in ("set", "mode", "prompt_id", "reward"))
        texts = isinstance(name, str) and isinstance(mode, str) and isinstance(prompt, str)
        if not texts or "reward" not in line or not isinstance(reward, int | float | None):
            raise ValueError(
                f"{path}, line {n}: expected the keys set, mode, prompt_id and reward, as `miles-like eval "
                "--answers` writes them"
            )
        found = of[str(name)][str(prompt)].setdefault(str(mode), [])
        if reward is not None:
            text = line.get("response")
            ended = line.get("finish", Finish.STOP) == Finish.STOP
            found.append(Answer(reward, text if isinstance(text, str) else None, ended))
    ids = {i.prompt.id for i in table.items}
    best: Mapping[str, dict[str, list[Answer]]] = max(
        of.values(), key=lambda of_set: len(of_set.keys() & ids), default={}
    )
    out = {}
    for prompt, modes in best.items():
        scored = modes.get("sampled") or modes.get("greedy") or []
        if prompt in ids and scored:
            out[prompt] = scored
    if not out:
        raise ValueError(
            f"{path}: none of its answers belongs to one of the {len(ids)} prompts of {table.path}: use the file "
            "that was evaluated, with the same columns, and pass the model's --tokenizer if the prompts have no "
            "ids and use a chat template"
        )
    return out


def pass_rates(path: Path, table: Table, pass_at: float) -> Mapping[str, PassRate]:
    """Prompt id -> its pass rate by the answers of `scored_answers`. An answer passes with a reward of `pass_at` or
    more. Raises ValueError as `scored_answers`."""
    return {
        prompt: PassRate(sum(a.reward >= pass_at for a in scored), len(scored))
        for prompt, scored in scored_answers(path, table).items()
    }


def strata_counts(rates: Mapping[str, PassRate]) -> dict[str, int]:
    """Stratum -> prompts, in the order of STRATA."""
    counts = Counter(stratum(r.share) for r in rates.values())
    return {name: counts[name] for name in STRATA}
