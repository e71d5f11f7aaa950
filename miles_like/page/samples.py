"""Samples of a run for a page: from a few steps, of each as many as fit, with the values of their tokens.

A run of 10,000 steps has gigabytes of rollouts/step_N.jsonl. The page has samples of at most FILES steps: the first,
the last ones, and some between.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

from miles_like.limits.regular_files import MIB, check_inside, parse_json, read_own
from miles_like.page.curves import short

FILES, RECENT = 8, 3  # steps with samples, of which the last ones
FILE_BYTES, ALL_BYTES = 1024 * MIB, 512 * MIB  # largest file that is read; of all of them, beyond the first and last
SAMPLES = 600  # of all steps together
TEXT = 20_000  # characters of a prompt or a response
TOKENS, ALL_TOKENS = 4_096, 200_000  # with their values: of a sample, of all samples
BINS = 30
EDGES = (0.125, 0.25, 0.5, 0.8, 0.9, 0.95, 0.99, 1.01, 1.05, 1.1, 1.25, 2.0, 4.0, 8.0)  # of rho
WORST = 5  # samples of each cause
KEYS = ("index", "prompt", "response", "answer", "reward", "finish")

Row = Mapping[str, Any]
Words = Callable[[Sequence[int]], list[str]]  # token ids -> their texts


@dataclass(frozen=True, slots=True)
class Cause:
    """What makes a sample bad. figure: of a sample, None where it is not bad for this; the largest are the worst."""

    name: str
    figure: Callable[[Row], float | None]
    unit: str


@dataclass(slots=True)
class Kept:
    """samples: for the page. worst: {"cause", "unit", "figure", "sample"}, the last the place of one in `samples`.
    rewards: step -> rewards of all its samples. left_out: samples of these steps that the page does not have."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    worst: list[dict[str, Any]] = field(default_factory=list)
    rewards: dict[int, list[float]] = field(default_factory=dict)
    left_out: int = 0
    ratios: dict[str, Any] | None = None  # `ratios` of the last step with the trainer's log-probs


def kept_samples(run_dir: Path, words: Words | None = None, every: int = 0) -> Kept:
    """words: of the run's tokenizer; None: tokens are shown as their ids. every: as of `chosen_files`. Raises
    ValueError for a line that is no sample, and for a file that is not a regular file of the directory."""
    out, rows = Kept(), list[tuple[int, Row]]()
    for step, path in chosen_files(run_dir / "rollouts", every):
        found = list(sample_lines(path, run_dir))
        out.rewards[step] = [float(r["reward"]) for r in found if is_number(r["reward"]) and not r.get("row")]
        rows += [(step, row) for row in found]
        if (of_step := ratios(found)) is not None:
            out.ratios = of_step | {"step": step}
    worst = {(i, cause.name): v for cause in CAUSES for i, v in _worst([r for _, r in rows], cause.figure)}
    chosen = _chosen(len(rows), {i for i, _ in worst})
    places, left = {row: place for place, row in enumerate(chosen)}, ALL_TOKENS
    for i in chosen:
        step, row = rows[i]
        made = _page_sample(step, row, words, min(TOKENS, left))
        left -= sum(len(turn["ids"]) for turn in made["turns"])
        out.samples.append(made)
    units = {cause.name: cause.unit for cause in CAUSES}
    out.worst = [
        {"cause": name, "unit": units[name], "figure": short(v), "sample": places[i]}
        for (i, name), v in sorted(worst.items(), key=lambda one: list(units).index(one[0][1]))
    ]
    out.left_out = len(rows) - len(chosen)
    return out


def step_files(folder: Path) -> dict[int, Path]:
    """Step -> file, of the files step_N.jsonl."""
    matches = ((re.fullmatch(r"step_(\d{1,15})\.jsonl", path.name), path) for path in folder.glob("step_*.jsonl"))
    return {int(match[1]): path for match, path in matches if match}


def chosen_files(folder: Path, every: int = 0) -> list[tuple[int, Path]]:
    """(step, file), ascending, of at most FILES steps. every: of train.token_logprobs_every; the last of its steps is
    among them."""
    files = step_files(folder)
    steps = sorted(files)
    if len(steps) > FILES:
        due = [step for step in steps[:-RECENT] if every and step % every == 0][-1:]
        between, early = FILES - RECENT - len(due), len(steps) - RECENT
        steps = sorted({*(steps[early * i // between] for i in range(between)), *due, *steps[-RECENT:]})
    size, out = 0, []
    for step in steps:
        size += 0 if step in (steps[0], steps[-1]) else _size(files[step])
        if size <= ALL_BYTES or step in (steps[0], steps[-1]):
            out.append((step, files[step]))
    return out


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # removed since it was listed, or a link that leads nowhere: reading it says so
        return 0


def sample_lines(path: Path, run_dir: Path) -> Iterator[Row]:
    """Raises ValueError naming a line that is no sample. A last line that is being written is left out."""
    lines = own_text(path, run_dir, FILE_BYTES).split("\n")  # splitlines would cut texts at U+2028 too
    for number, line in enumerate(lines, 1):
        if number == len(lines) and not line:
            return
        try:
            row = parse_json(line)
        except ValueError as e:
            if number == len(lines):
                return
            raise ValueError(f"{path} line {number} is damaged ({e}): remove that line") from None
        missing = [k for k in KEYS if not isinstance(row, dict) or k not in row]
        if missing:
            raise ValueError(f"{path} line {number} is not a sample, it has no {missing[0]!r}: remove that line")
        yield row


def own_text(path: Path, directory: Path, limit: int) -> str:
    """The text of a file in the run directory. Raises ValueError as `read_own`, and for bytes that are not UTF-8."""
    try:
        return read_own(path, directory, limit).decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is damaged: it is not UTF-8 ({e}); remove it") from None


def is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100


def _chosen(n: int, always: set[int]) -> list[int]:
    """At most SAMPLES of n places, `always` among them, the others evenly."""
    room = max(0, SAMPLES - len(always))
    others = [i for i in range(n) if i not in always]
    if len(others) > room:
        others = [others[len(others) * k // room] for k in range(room)] if room else []
    return sorted([*always, *others])


def _worst(rows: Sequence[Row], figure: Callable[[Row], float | None]) -> list[tuple[int, float]]:
    """(place, figure) of the WORST rows."""
    figures = [(i, value) for i, row in enumerate(rows) if (value := figure(row)) is not None]
    return sorted(figures, key=lambda one: -one[1])[:WORST]


def _low_reward(row: Row) -> float | None:
    return -float(row["reward"]) if is_number(row["reward"]) and row["reward"] <= 0 else None


def _no_score(row: Row) -> float | None:
    return None if is_number(row["reward"]) else 1.0


def _truncated(row: Row) -> float | None:
    return _tokens(row) if row["finish"] == "length" else None


def _empty(row: Row) -> float | None:
    return 1.0 if row.get("tokens") == 0 else None


def _unlikely(row: Row) -> float | None:
    return -float(mean) if is_number(mean := row.get("logprob_mean")) and mean < 0 else None


def _gap(row: Row) -> float | None:
    gaps = [abs(a - b) for a, b in zip(_floats(row, "trainer_logprobs"), _floats(row, "logprobs"), strict=False)]
    return max(gaps, default=None)


def _other_routes(row: Row) -> float | None:
    share = row.get("routing_agreement")
    return 1 - float(share) if is_number(share) and share < 1 else None


def _old(row: Row) -> float | None:
    versions = [v for v, _, _ in _spans(row)]
    return float(max(versions) - min(versions)) if len(set(versions)) > 1 else None


def _tokens(row: Row) -> float | None:
    return float(row["tokens"]) if is_number(row.get("tokens")) else None


CAUSES = (
    Cause("largest log-prob gap", _gap, "nats"),
    Cause("routes that the trainer would not choose", _other_routes, "share of experts"),
    Cause("no score", _no_score, ""),
    Cause("truncated at the token limit", _truncated, "tokens"),
    Cause("no response token", _empty, ""),
    Cause("reward of 0 or less", _low_reward, "below 0"),
    Cause("least likely under the rollout", _unlikely, "nats/token"),
    Cause("weight versions within a sample", _old, "versions"),
)


def _floats(row: Row, key: str) -> list[float]:
    values = row.get(key)
    return [float(v) for v in values if is_number(v)] if isinstance(values, list) else []


def _spans(row: Row) -> list[tuple[int, int, int]]:
    """(weight version, first, past the last) of stretches of response tokens."""
    spans = row.get("versions")
    return [
        (span[0], span[1], span[2])
        for span in (spans if isinstance(spans, list) else ())
        if isinstance(span, list) and len(span) == 3 and all(type(v) is int and abs(v) < 1 << 53 for v in span)
    ]


def _page_sample(step: int, row: Row, words: Words | None, tokens: int) -> dict[str, Any]:
    parts = row.get("reward_parts")
    return {
        "step": step,
        "id": cut(row.get("prompt_id", "")),
        "index": row["index"] if type(row["index"]) is int else 0,
        **({"row": row["row"]} if row.get("row") and type(row["row"]) is int else {}),
        "prompt": cut(row["prompt"]),
        "response": cut(row["response"]),
        "answer": cut(row["answer"]),
        "reward": short(row["reward"]) if is_number(row["reward"]) else None,
        "parts": {cut(k): short(v) for k, v in parts.items() if is_number(v)} if isinstance(parts, dict) else {},
        "finish": cut(row["finish"]),
        "tokens": row.get("tokens") if type(row.get("tokens")) is int else None,
        "logprob": short(mean) if is_number(mean := row.get("logprob_mean")) else None,
        "turns": _turns(step, row, words, tokens),
    }


def cut(value: object) -> str:
    """A text for the page, of at most TEXT characters; None is empty."""
    text = "" if value is None else str(value)
    return text if len(text) <= TEXT else f"{text[:TEXT]}… ({len(text) - TEXT:,} characters more)"


def _turns(step: int, row: Row, words: Words | None, limit: int) -> list[dict[str, Any]]:
    """Stretches of tokens of the policy (`own`) and of others: first the prompt, then what an environment wrote.

    Of the policy's tokens: `logprobs` of the rollout, `gap` where the row has the trainer's, `advantage` where it has
    them, `age` in versions, the weights that the step trains less those that sampled the token.
    """
    ids, mask = row.get("token_ids"), row.get("loss_mask")
    if not (isinstance(ids, list) and isinstance(mask, list) and len(ids) == len(mask)):
        return []
    if not all(type(i) is int and 0 <= i < 1 << 31 for i in ids[:limit]):
        return []
    logprobs, trainer = _floats(row, "logprobs"), _floats(row, "trainer_logprobs")
    given = row.get("advantages")
    advantages = [float(given)] * len(logprobs) if is_number(given) else _floats(row, "advantages")
    spans, out, own, notes = _spans(row), list[dict[str, Any]](), 0, _notes(row)
    for i, (token, loss) in enumerate(zip(ids[:limit], mask[:limit], strict=True)):
        if not out or out[-1]["own"] != bool(loss):
            note = notes.get(i, "") if out else ""
            own_columns: dict[str, Any] = {"logprobs": [], "gap": [], "advantage": [], "age": []}
            out.append({"own": bool(loss), "ids": [], **({"note": note} if note else {}), **own_columns})
        turn = out[-1]
        turn["ids"].append(token)
        if loss:
            version = next((v for v, first, last in spans if first <= own < last), None)
            pairs = (("logprobs", logprobs), ("advantage", advantages))
            for name, values in pairs:
                turn[name] += [short(values[own])] if own < len(values) else []
            if own < min(len(trainer), len(logprobs)):
                turn["gap"].append(short(trainer[own] - logprobs[own]))
            turn["age"] += [] if version is None else [step - 1 - version]
            own += 1
        if i == limit - 1 and len(ids) > limit:
            turn["more"] = len(ids) - limit
    for turn in out:
        if words is not None:
            turn["words"] = words(turn["ids"])
    return [{k: v for k, v in turn.items() if v != [] or k == "ids"} for turn in out]


def _notes(row: Row) -> dict[int, str]:
    """First token of each turn that has spans -> its reward, its seconds, and the tools called in it."""
    out: dict[int, list[str]] = {}
    spans = row.get("spans")
    first = 0
    for span in spans if isinstance(spans, list) else ():
        if not (isinstance(span, dict) and type(span.get("start")) is int):
            continue
        if span.get("what") == "turn":
            first = span["start"]
            reward, seconds = span.get("reward"), span.get("seconds")
            out[first] = [f"reward {short(reward)}"] if is_number(reward) else []
            out[first] += [f"{short(seconds)} s"] if is_number(seconds) and seconds else []
        elif span.get("what") in ("tool_call", "tool_result"):
            words = (span["what"].replace("_", " "), span.get("name") or "", span.get("status") or "")
            out.setdefault(first, []).append(" ".join(cut(word) for word in words if word))
    return {first: ", ".join(words) for first, words in out.items() if words}


def ratios(rows: Sequence[Row]) -> dict[str, Any] | None:
    """Tokens by rho, the trainer's probability over the rollout's, before the step: `bins` between EDGES and `counts`.
    None without the trainer's log-probs."""
    pairs = [
        pair for row in rows for pair in zip(_floats(row, "trainer_logprobs"), _floats(row, "logprobs"), strict=False)
    ]
    if not pairs:
        return None
    counts = [0] * (len(EDGES) + 1)
    for trainer, rollout in pairs:
        counts[bisect.bisect_right(EDGES, math.exp(min(trainer - rollout, 700.0)))] += 1
    inner = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(EDGES)]
    return {"bins": [f"below {EDGES[0]:g}", *inner, f"{EDGES[-1]:g} and more"], "counts": counts}


def histograms(rewards: Mapping[int, Sequence[float]]) -> dict[str, Any] | None:
    """Samples by reward of the first and the last step of `rewards`: `centres` [bins], `counts` {step: [bins]}, of at
    most BINS equal bins over both; of few different rewards a bin for each. None where no sample has one."""
    steps = [s for s in sorted(rewards) if rewards[s]]
    if not steps:
        return None
    ends = sorted({steps[0], steps[-1]})
    values = [v for s in ends for v in rewards[s]]
    if len(different := sorted(set(values))) <= BINS // 3:
        counts = {str(s): [Counter(rewards[s])[v] for v in different] for s in ends}
        return {"centres": [f"{v:.4g}" for v in different], "counts": counts}
    low, high = min(values), max(values)
    width = (high - low) / BINS

    def place(value: float) -> int:
        return min(BINS - 1, math.floor((value - low) / width))

    found = {str(s): Counter(map(place, rewards[s])) for s in ends}
    centres = [f"{low + (i + 0.5) * width:.3g}" for i in range(BINS)]
    return {"centres": centres, "counts": {s: [c[i] for i in range(BINS)] for s, c in found.items()}}


def check_own(folder: Path, run_dir: Path) -> bool:
    """Whether there is `folder`. Raises ValueError where it leads out of the run directory."""
    if not folder.exists():
        return False
    check_inside(folder, run_dir)
    return True
