"""What is in a file: counts, sources, licences, languages, lengths and pass rates."""

from __future__ import annotations

import functools
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from miles_like.datasets.strata import PassRate, strata_counts
from miles_like.datasets.table import Table
from miles_like.storage.completion import file_sha256, write_atomically
from rollout.prompts.source import Tokenizer

LICENCES = ("license", "licence")  # columns, the first one present
NONE = "none given"
UNKNOWN = "und"  # ISO 639-2: undetermined
_LETTERS, _SURE = 20, 0.9  # fewer letters, or a lower probability: undetermined


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Quantiles of lengths. A quantile is one of the lengths."""

    least: int
    median: int
    mean: float
    p95: int
    most: int

    def __str__(self) -> str:
        return f"{self.least} to {self.most}, median {self.median}, mean {self.mean:.1f}, 95 % up to {self.p95}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counts are of rows; an empty mapping or None was not measured."""

    path: str
    sha256: str  # of the file; "" of a dataset on the hub
    rows: int
    answered: int
    sources: Mapping[str, int]
    licences: Mapping[str, int]
    languages: Mapping[str, int]
    prompt_chars: Lengths
    answer_chars: Lengths | None  # of rows with an answer
    prompt_tokens: Lengths | None  # with template and instruction
    answer_tokens: Lengths | None
    strata: Mapping[str, int] = field(default_factory=dict)
    pass_rate: float | None = None  # mean over the answered prompts

    def write_json(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    def lines(self) -> Iterator[str]:
        """For the console and the data card: a name, a colon, a value."""
        yield f"rows: {self.rows}, {self.answered} with an answer"
        yield f"sha256: {self.sha256 or 'not a file'}"
        yield f"sources: {listed(self.sources)}"
        yield f"licences: {listed(self.licences)}"
        yield f"languages: {listed(self.languages)}"
        yield f"characters of a prompt: {self.prompt_chars}"
        if self.answer_chars is not None:
            yield f"characters of an answer: {self.answer_chars}"
        if self.prompt_tokens is not None:
            yield f"tokens of a prompt: {self.prompt_tokens}"
        if self.answer_tokens is not None:
            yield f"tokens of an answer: {self.answer_tokens}"
        if self.pass_rate is not None:
            yield f"pass rate: {self.pass_rate:.4f} over {sum(self.strata.values())} answered prompts"
            yield f"strata: {listed(self.strata)}"


def lengths_of(values: Iterable[int]) -> Lengths | None:
    """None of no values."""
    v = sorted(values)
    if not v:
        return None
    return Lengths(
        least=v[0],
        median=statistics.median_low(v),
        mean=statistics.fmean(v),
        p95=v[-(-95 * len(v) // 100) - 1],  # the smallest that 95 % do not exceed
        most=v[-1],
    )


def measure(
    table: Table,
    tokenizer: Tokenizer | None = None,
    rates: Mapping[str, PassRate] | None = None,
    rows: Sequence[int] | None = None,
) -> Stats:
    """rows: those to measure; None: all. Raises ValueError for a table without any."""
    items = table.items if rows is None else [table.items[i] for i in rows]
    answers = [i.prompt.answer for i in items if i.prompt.answer]
    prompt_chars = lengths_of(len(i.asked) for i in items)
    if prompt_chars is None:
        raise ValueError(f"{table.path}: there are no rows to measure")
    counted = tokenizer if table.tokenized else None
    rates = rates or {}
    return Stats(
        path=table.path,
        sha256=file_sha256(Path(table.path)) if Path(table.path).is_file() else "",
        rows=len(items),
        answered=len(answers),
        sources=_counts(i.prompt.source or NONE for i in items),
        licences=_counts(licence_of(i.row) for i in items),
        languages=_counts(language_of(i.asked) for i in items),
        prompt_chars=prompt_chars,
        answer_chars=lengths_of(map(len, answers)),
        prompt_tokens=None if counted is None else lengths_of(len(i.prompt.token_ids) for i in items),
        answer_tokens=None
        if counted is None
        else lengths_of(len(counted.encode(a, add_special_tokens=False)) for a in answers),
        strata=strata_counts(rates) if rates else {},
        pass_rate=statistics.fmean(r.share for r in rates.values()) if rates else None,
    )


def language_of(text: str) -> str:
    """Its ISO 639-1 code by py3langid; UNKNOWN for fewer than 20 letters, such as a sum, and where the probability of
    the likeliest is below 0.9."""
    if sum(map(str.isalpha, text)) < _LETTERS:
        return UNKNOWN
    code, probability = _identifier().classify(text)
    return str(code) if probability >= _SURE else UNKNOWN


@functools.cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier  # 1 s, most of it its model

    made = LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
    # languages with a code of three letters, such as Wu Chinese, take half of the probability of their neighbours
    made.set_languages([code for code in made.labels if len(code) == 2])
    return made


def licence_of(row: Mapping[str, Any]) -> str:
    """The row's licence as written, NONE where no column names one."""
    return next((str(row[key]) for key in LICENCES if row.get(key)), NONE)


def listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in counts.items())


def _counts(values: Iterable[str]) -> dict[str, int]:
    """The most frequent first, of equal counts in the order of the names."""
    return dict(sorted(Counter(values).items(), key=lambda item: (-item[1], item[0])))
