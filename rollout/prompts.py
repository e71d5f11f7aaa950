"""The prompts of a run, of one file or of several sources, tokenized once and dealt out in a reproducible order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from miles_like.types import Json, Prompt
from rollout.curriculum import Curriculum
from rollout.data_config import TRAIN, DataConfig, SourceConfig
from rollout.source import Source, Tokenizer


class PromptSource:
    """What `take` deals is a function of (seed, prompts dealt so far, observations so far), and of the files.

    path: a file (.json, .jsonl, .parquet) or a hub name, optionally NAME:SPLIT (split "train" when left out); None:
    what `config` trains on, which may be several sources.
    compared_by: the reward that compares with the answers; None: a prompt may be without one, and its answer is "".
    Raises ValueError saying which file, row and column is at fault: a missing file or column, no rows, a prompt without
    text or without the answer that it needs, the same id twice, a prompt of more than max_prompt_tokens, a file that
    holds no prompts.
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
        given = config.trained() if path is None else {TRAIN: SourceConfig(path=path)}
        self._sources = {
            name: Source(
                config.of(s),
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
        """Every prompt, source by source in file order, whatever was dealt."""
        return tuple(self._by_id.values())

    def find(self, prompt_id: str) -> Prompt:
        """Raises ValueError when there is no such prompt."""
        if prompt_id not in self._by_id:
            files = ", ".join(s.path for s in self._sources.values())
            raise ValueError(f"{files}: there is no prompt {prompt_id!r}: was the file changed since the checkpoint?")
        return self._by_id[prompt_id]

    @property
    def said(self) -> tuple[str, ...]:
        """A sentence for each choice of columns that could have been another."""
        return tuple(sentence for s in self._sources.values() for sentence in s.said)

    @property
    def instructions(self) -> frozenset[str]:
        """What was put after prompts."""
        return frozenset(s.instruction for s in self._sources.values())

    @property
    def ended(self) -> bool:
        """Whether every source has given all its epochs. So it is after a `take` that gave fewer than it was asked."""
        return all(s.ended for s in self._sources.values())

    @property
    def resting(self) -> int:
        """Prompts that the curriculum passes over when their turn comes."""
        return len(self._curriculum.rests)

    def take(self, k: int) -> list[Prompt]:
        """The next k, fewer when all sources end.

        Each is of the source that is furthest behind its share: that of the smallest (dealt + 1/2) / weight (the
        divisor method of Webster and Sainte-Lague), the first named of equal ones. A source that has ended leaves its
        share to the others. Within a source every row comes once an epoch, unless it rests.
        """
        out: list[Prompt] = []
        while len(out) < k:
            open_ = [s for s in self._sources.values() if not s.ended]
            if not open_:
                break
            behind = min(open_, key=lambda s: (s.dealt + 0.5) / s.weight)
            prompt = behind.next(self._curriculum)
            if prompt is not None:
                out.append(prompt)
        return out

    def observe(self, measured: Iterable[tuple[str, Sequence[float]]]) -> None:
        """Prompt ids and the rewards of their samples, of every group that came back since the last call, also of those
        that a filter left out: equal rewards are what a curriculum wants to know of. In an order that does not depend
        on the clock, where dealing is not to depend on it. Raises ValueError for an id that is not there."""
        for prompt_id, rewards in measured:
            self._curriculum.observe(self.find(prompt_id).id, rewards)

    def drop(self, ids: Collection[str]) -> None:
        """Before anything is dealt: as if the prompts of these ids were not there. Raises ValueError when a source has
        none left."""
        for s in self._sources.values():
            s.drop(ids)
        self._by_id = _by_id(self._sources.values())

    def state(self) -> dict[str, Json]:
        """JSON: of each source where it stands and a digest of its prompts, and what rests."""
        sources = {name: s.state() for name, s in self._sources.items()}
        return {"sources": sources, "rests": dict(sorted(self._curriculum.rests.items()))}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to where `state` was taken: the same seed then deals the same prompts.

        Raises ValueError naming the file when prompts are not those of the checkpoint, the sources are others, or the
        state is none that `state` gave. Nothing is changed then.
        """
        sources, rests = state.get("sources"), state.get("rests")
        if not isinstance(sources, Mapping) or not isinstance(rests, Mapping):
            raise ValueError(f"the saved position of the prompts is damaged: it holds {sorted(state)}")
        if sources.keys() != self._sources.keys():
            raise ValueError(
                f"the run has the sources {', '.join(self._sources)}, the checkpoint was made with "
                f"{', '.join(sources)}: give it these, or start a new run"
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
    """All prompts. Raises ValueError for an id that is there twice, naming both places."""
    out: dict[str, Prompt] = {}
    places: dict[str, tuple[str, str]] = {}
    for s in sources:
        for place, p in zip(s.places, s.prompts, strict=True):
            if p.id in out:
                path, first = places[p.id]
                where = f"{first} and {place}" if path == s.path else f"{first}, and {s.path}, {place},"
                raise ValueError(f"{path}: {where} are the same prompt ({p.id!r}): give each row its own id")
            out[p.id], places[p.id] = p, (s.path, place)
    return out
