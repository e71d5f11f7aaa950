"""The prompts of a run from one or several sources, tokenized once and issued in a reproducible order.

They stay on disk: memory holds some 50 bytes a prompt, its place in a file and a hash of its id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from miles_like.types import Json, Prompt
from rollout.prompts.config import TRAIN, DataConfig, SourceConfig
from rollout.prompts.curriculum import Curriculum
from rollout.prompts.ids import Ids
from rollout.prompts.source import Source, Tokenizer
from rollout.prompts.spool import Joined


class PromptSource:
    """All prompts of a run. The result of `take` depends only on the seed, the files, the number of prompts taken so
    far and the observations so far.

    path: a file (.json, .jsonl, .parquet) or a hub name, optionally NAME:SPLIT (default split "train"); None: the
    training sources of `config`.
    compared_by: the reward that compares with the answers; None: prompts without an answer are allowed and have "".
    Raises ValueError naming file, row and column: for a missing file or column, a file without rows or without prompts,
    a prompt without text or without a needed answer, a duplicate id, and a prompt of more than max_prompt_tokens.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        path: str | None = None,
        *,
        seed: int = 0,
        compared_by: str | None = None,
    ) -> None:
        several = path is None and bool(config.sources)
        given = config.train_sources() if path is None else {TRAIN: SourceConfig(path=path)}
        self._sources = {
            name: Source(
                config.for_source(s),
                tokenizer,
                s.path,
                name=name if several else "",
                weight=s.weight,
                seed=f"{seed} {name}" if several else seed,
                compared_by=compared_by,
            )
            for name, s in given.items()
        }
        self._curriculum = Curriculum(config.curriculum)
        self._ids = self._unique_ids()

    def _unique_ids(self) -> Ids:
        """Raises ValueError for a duplicate id, naming both places."""
        ids = Ids(np.concatenate([s.hashes for s in self._sources.values()]), lambda i: self.all()[i].id)
        if (twice := ids.twice()) is not None:
            (s, i), (other, j) = map(self._placed, twice)
            where = f"{s.place(i)} and {other.place(j)}"
            if s.path != other.path:
                where = f"{s.place(i)}, and {other.path}, {other.place(j)},"
            name = s.prompts[i].id
            raise ValueError(f"{s.path}: {where} have the same id ({name!r}): give each row a unique id")
        return ids

    def _placed(self, number: int) -> tuple[Source, int]:
        """The source of a prompt, and its number there."""
        for s in self._sources.values():
            if number < len(s.prompts):
                return s, number
            number -= len(s.prompts)
        raise IndexError(number)

    def __len__(self) -> int:
        return sum(len(s.prompts) for s in self._sources.values())

    def all(self) -> Sequence[Prompt]:
        """Every prompt, source by source, in file order. They are on disk, so a loop reads one after the other; a slice
        is in memory."""
        return Joined(s.prompts for s in self._sources.values())

    def find(self, prompt_id: str) -> Prompt:
        """Raises ValueError if there is no such prompt."""
        number = self._ids.find(prompt_id)
        if number is None:
            files = ", ".join(s.path for s in self._sources.values())
            raise ValueError(f"{files}: no prompt {prompt_id!r}: use the file as it was when the checkpoint was saved")
        return self.all()[number]

    @property
    def notes(self) -> tuple[str, ...]:
        """A message for each ambiguous choice of a column."""
        return tuple(note for s in self._sources.values() for note in s.notes)

    @property
    def instructions(self) -> frozenset[str]:
        """The instructions appended to prompts."""
        return frozenset(s.instruction for s in self._sources.values())

    @property
    def ended(self) -> bool:
        """Whether all epochs of all sources are over. True after a `take` that returned fewer prompts than asked."""
        return all(s.ended for s in self._sources.values())

    def take(self, k: int) -> list[Prompt]:
        """The next k prompts, or fewer if all sources end.

        Each comes from the source with the smallest (taken + 1/2) / weight, the first one of equals: the divisor method
        of Webster and Sainte-Lague. The share of a source that has ended goes to the others. Within a source every row
        is taken once per epoch, unless it rests.
        """
        out: list[Prompt] = []
        while len(out) < k:
            open_ = [s for s in self._sources.values() if not s.ended]
            if not open_:
                break
            source = min(open_, key=lambda s: (s.taken + 0.5) / s.weight)
            prompt = source.next(self._curriculum)
            if prompt is not None:
                out.append(prompt)
        return out

    def observe(self, measured: Iterable[tuple[str, Sequence[float]]]) -> dict[str, float]:
        """Record prompt ids and the rewards of their samples for every group finished since the last call, including
        groups that a filter discarded: the curriculum needs groups of equal rewards. The order affects `take`, so it
        must not depend on timing if the run is to be reproducible. Returns the metrics of the curriculum, none without
        one. Raises ValueError for an unknown id."""
        for prompt_id, rewards in measured:
            self._curriculum.observe(self.find(prompt_id).id, rewards)
        return self._curriculum.metrics(len(self))

    def drop(self, ids: Collection[str]) -> None:
        """Remove prompts before the first `take`. Raises ValueError if a source has none left."""
        numbers = {number for prompt_id in ids if (number := self._ids.find(prompt_id)) is not None}
        found = list(map(self._placed, numbers))
        for s in self._sources.values():
            s.drop({i for of, i in found if of is s})
        self._ids = self._unique_ids()

    def state(self) -> dict[str, Json]:
        """JSON: position and digest of each source, and the resting prompts."""
        sources = {name: s.state() for name, s in self._sources.items()}
        return {"sources": sources, "rests": dict(sorted(self._curriculum.rests.items()))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Return to the position of `state`: with the same seed, the same prompts follow.

        Raises ValueError, and changes nothing, if the prompts or sources differ from those of the checkpoint, or if the
        state is damaged.
        """
        sources, rests = state.get("sources"), state.get("rests")
        if not isinstance(sources, Mapping) or not isinstance(rests, Mapping):
            raise ValueError(f"the saved position of the prompts is damaged: it has the keys {sorted(state)}")
        if sources.keys() != self._sources.keys():
            raise ValueError(
                f"the run has the sources {', '.join(self._sources)}, but the checkpoint was saved with "
                f"{', '.join(sources)}: use the latter, or start a new run"
            )
        for name, s in self._sources.items():
            s.check(sources[name])
        for prompt_id, left in rests.items():
            if self._ids.find(str(prompt_id)) is None or type(left) is not int or left < 1:
                raise ValueError(f"the saved position of the prompts is damaged: {prompt_id!r} rests {left!r} times")
        for name, s in self._sources.items():
            s.restore(sources[name])
        self._curriculum.rests = dict(rests)
