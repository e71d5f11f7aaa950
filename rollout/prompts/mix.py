"""The prompts of a run from one or several sources, tokenized once and issued in a reproducible order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from miles_like.types import Json, Prompt
from rollout.prompts.config import TRAIN, DataConfig, SourceConfig
from rollout.prompts.curriculum import Curriculum
from rollout.prompts.source import Source, Tokenizer


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
        self._by_id = _by_id(self._sources.values())

    def __len__(self) -> int:
        return len(self._by_id)

    def all(self) -> Sequence[Prompt]:
        """Every prompt, source by source, in file order."""
        return tuple(self._by_id.values())

    def find(self, prompt_id: str) -> Prompt:
        """Raises ValueError if there is no such prompt."""
        if prompt_id not in self._by_id:
            files = ", ".join(s.path for s in self._sources.values())
            raise ValueError(f"{files}: no prompt {prompt_id!r}: use the file as it was when the checkpoint was saved")
        return self._by_id[prompt_id]

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
        for s in self._sources.values():
            s.drop(ids)
        self._by_id = _by_id(self._sources.values())

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
            if prompt_id not in self._by_id or type(left) is not int or left < 1:
                raise ValueError(f"the saved position of the prompts is damaged: {prompt_id!r} rests {left!r} times")
        for name, s in self._sources.items():
            s.restore(sources[name])
        self._curriculum.rests = dict(rests)


def _by_id(sources: Collection[Source]) -> dict[str, Prompt]:
    """Prompt id -> prompt. Raises ValueError for a duplicate id, naming both places."""
    out: dict[str, Prompt] = {}
    places: dict[str, tuple[str, str]] = {}
    for s in sources:
        for place, p in zip(s.places, s.prompts, strict=True):
            if p.id in out:
                path, first = places[p.id]
                where = f"{first} and {place}" if path == s.path else f"{first}, and {s.path}, {place},"
                raise ValueError(f"{path}: {where} have the same id ({p.id!r}): give each row a unique id")
            out[p.id], places[p.id] = p, (s.path, place)
    return out
