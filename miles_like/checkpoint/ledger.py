"""Accounts for every sample: issued once, then trained once or discarded once with a reason.

A sample is (group id, index): a prompt admitted to generation gets the next group id, 0, 1, 2, ... over the whole run,
and its samples are numbered 0 .. n-1. Samples of steps that a run has gone back over count as discarded. An entry that
contradicts the ledger raises RuntimeError and leaves the ledger unchanged: a sample trained twice counts double in a
gradient, a lost one biases training towards the answers that were returned, and no metric shows either.

`ledger.jsonl` has a line for each closed group, in the order of group ids (key "ticket"), and after the lines of each
step one line with the totals since the run began (ledger_audit.py reads the file alone):

    {"step":2,"ticket":8,"prompt":"p8","trained":[0,1,3],"discarded":{"no reward within 60 s":1}}
    {"step":2,"tickets":12,"issued":48,"trained":31,"discarded":5,"in_flight":12}

An episode of several rows is one sample; the line of its group has, by its index, how many rows were trained: "rows":
{"1":3}.

A run that goes back to an earlier step (docs/alerts.md) adds, before the totals of the step with which it does, a line
with the samples that the steps since then had trained:

    {"step":5,"to":2,"rolled_back":24}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from miles_like.checkpoint.ledger_audit import ROLLED_BACK, audit
from miles_like.protocols import Fencing
from miles_like.storage.appended_file import AppendedFile
from miles_like.types import Json, SampleGroup

_LISTED = 8  # group ids that a message lists


class _Issued(NamedTuple):
    prompt: str
    samples: int


class _Closed(NamedTuple):
    group_id: int
    prompt: str
    step: int | None  # the step that trained it; None: all its samples were discarded
    trained: tuple[int, ...]  # indices, ascending
    discarded: dict[str, int]  # reason -> samples
    rows: tuple[tuple[int, int], ...] = ()  # (index, rows) of episodes of several


class Ledger:
    """For use from one event loop. `path`: the file to append to; None: no file. fence: as in `AppendedFile`."""

    def __init__(self, path: Path | None, fence: Fencing | None = None) -> None:
        self._path = path
        self.file = None if path is None else AppendedFile(path, fence)
        self._next = 0  # group id
        self._open: dict[int, _Issued] = {}
        self._in_flight = 0  # samples
        self._issued = 0
        self._trained = 0
        self._discarded: Counter[str] = Counter()
        self._closed: list[_Closed] = []  # since the last flush
        self._flushed: int | None = None  # step
        self._back: tuple[int, int] | None = (
            None  # since the last flush: step gone back to, samples it has trained since
        )

    def issue(self, group_id: int, prompt_id: str, samples: int) -> None:
        """Samples 0 .. samples-1 of a prompt are requested. Raises RuntimeError when `group_id` is not the next one."""
        if group_id != self._next or samples < 1:
            why = "was issued already" if group_id < self._next else f"was issued before group {self._next}"
            why = why if samples > 0 else f"has {samples} samples"
            raise RuntimeError(f"ledger: group {group_id} (prompt {prompt_id!r}) {why}")
        self._next += 1
        self._open[group_id] = _Issued(prompt_id, samples)
        self._issued += samples
        self._in_flight += samples

    def discard(self, group_id: int, reason: str, *, discarded_samples: Mapping[str, int] | None = None) -> None:
        """Discard all samples of the group: those counted in `discarded_samples` (SampleGroup.discarded) for the
        reasons given there, the others for `reason`.

        Raises RuntimeError when the group is not open, or `discarded_samples` counts more samples than were issued.
        """
        issued = self._require_open(group_id)
        reasons = Counter(discarded_samples or {})
        rest = issued.samples - reasons.total()
        if rest < 0 or any(n < 1 for n in reasons.values()):
            raise RuntimeError(
                f"ledger: group {group_id} (prompt {issued.prompt!r}) has {issued.samples} samples, of which "
                f"{dict(reasons)} were discarded"
            )
        self._close(_Closed(group_id, issued.prompt, None, (), dict(reasons + Counter({reason: rest}))))

    def train(self, step: int, group_id: int, group: SampleGroup) -> None:
        """The samples of `group` are trained; those that `group.discarded` counts are discarded.

        step: of the row in metrics.jsonl that reports the training. Raises RuntimeError when the group is not open or
        is of another prompt, and unless each issued sample is trained or discarded once.
        """
        issued = self._require_open(group_id)
        what = f"ledger: group {group_id} (prompt {issued.prompt!r})"
        prompts = {group.prompt.id, *(s.prompt_id for s in group.samples)}
        if prompts != {issued.prompt}:
            raise RuntimeError(f"{what} was returned with prompt {min(prompts - {issued.prompt})!r}")
        rows = {of[0].index: [s.row for s in of] for of in group.rows}
        for i, found in sorted(rows.items()):
            if twice := [row for row, n in Counter(found).items() if n > 1]:
                which = f"row {twice[0]} of sample {i}" if twice[0] else f"sample {i}"
                raise RuntimeError(f"{what} was returned with {which} twice")
            if found != list(range(len(found))):
                raise RuntimeError(f"{what} was returned with the rows {found} of sample {i}: some are lost")
        indices = sorted(rows)
        unknown = [i for i in indices if not 0 <= i < issued.samples]
        if unknown:
            raise RuntimeError(
                f"{what} was returned with sample {unknown[0]}, but 0 .. {issued.samples - 1} were issued"
            )
        discarded_samples = sum(group.discarded.values())
        if len(indices) + discarded_samples != issued.samples or any(n < 1 for n in group.discarded.values()):
            raise RuntimeError(
                f"{what} has {issued.samples} samples and was returned with {len(indices)} to train and "
                f"{discarded_samples} discarded ({dict(group.discarded)})"
            )
        several = tuple((i, len(found)) for i, found in sorted(rows.items()) if len(found) > 1)
        self._close(_Closed(group_id, issued.prompt, step, tuple(indices), dict(group.discarded), several))

    def go_back(self, to: int) -> int:
        """All open groups, and all samples that were trained after step `to`, count as discarded for ROLLED_BACK.
        Returns how many of the latter there are. Raises RuntimeError where the file has no totals of step `to`, as
        where it is not one that the run has reached and not given up."""
        assert self._path is not None and not self._closed, "after `flush`, and of a file"
        totals = {one.step: one.trained for one in audit(self._path).kept}
        if to and to not in totals:
            raise RuntimeError(f"ledger: {self._path} has no totals of step {to}, to which the run goes back")
        for group_id in list(self._open):
            self.discard(group_id, ROLLED_BACK)
        n = self._trained - totals.get(to, 0)
        self._trained -= n
        self._discarded[ROLLED_BACK] += n
        self._back = to, n
        return n

    def check(self, open_groups: Collection[int]) -> None:
        """Raises RuntimeError unless these are the ids of the open groups, and issued = trained + discarded + in
        flight."""
        held = set(open_groups)
        if lost := self._open.keys() - held:
            raise RuntimeError(f"ledger: the loop lost open groups {_some(lost)} and their samples")
        if again := held - self._open.keys():
            raise RuntimeError(f"ledger: the loop holds groups {_some(again)}, which are closed or were never issued")
        in_flight = sum(i.samples for i in self._open.values())
        if in_flight != self._in_flight or self._issued != self._trained + self._discarded.total() + in_flight:
            raise RuntimeError(f"ledger: {self.summary()} does not add up: a sample was lost or counted twice")

    def metrics(self) -> dict[str, float]:
        """Numbers of samples since the run began."""
        return {
            "ledger/issued": float(self._issued),
            "ledger/trained": float(self._trained),
            "ledger/discarded": float(self._discarded.total()),
            "ledger/in_flight": float(self._in_flight),
        }

    def flush(self, step: int) -> None:
        """Called at a step boundary: append the groups closed since the last one, and the totals, in one write. Called
        again after the last step where the prompts have ended: writes only if groups were closed since."""
        assert all(c.step in (None, step) for c in self._closed), f"a group of another step than {step}"
        again, self._flushed = step == self._flushed, step
        if again and not self._closed and self._back is None:
            return
        lines: list[Mapping[str, Json]] = [
            {
                "step": step,
                "ticket": c.group_id,
                "prompt": c.prompt,
                "trained": c.trained,
                "discarded": dict(sorted(c.discarded.items())),
                **({"rows": {str(i): n for i, n in c.rows}} if c.rows else {}),
            }
            for c in sorted(self._closed)
        ]
        if self._back is not None:
            lines.append({"step": step, "to": self._back[0], "rolled_back": self._back[1]})
            self._back = None
        totals = {"trained": self._trained, "discarded": self._discarded.total(), "in_flight": self._in_flight}
        lines.append({"step": step, "tickets": self._next, "issued": self._issued, **totals})
        self._closed.clear()
        if self.file is not None:
            self.file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in lines))

    def state(self) -> Json:
        """The state at a step boundary, after `flush`."""
        assert not self._closed, f"{len(self._closed)} groups were closed and not flushed"
        return {
            "next": self._next,
            "issued": self._issued,
            "trained": self._trained,
            "discarded": dict(self._discarded),
            "open": [[group_id, *issued] for group_id, issued in self._open.items()],
        }

    def restore(self, state: Any) -> None:
        """Restore a saved `state()`; the file has been cut back to that state. Raises ValueError when `state` is
        damaged, and when the file is damaged or ends with other totals."""
        assert not self._next, f"{self._next} groups were issued: restore into a new ledger"
        try:
            open_groups = {int(i): _Issued(str(prompt), int(n)) for i, prompt, n in state["open"]}
            self._next, self._issued, self._trained = (int(state[key]) for key in ("next", "issued", "trained"))
            self._discarded = Counter({str(reason): int(n) for reason, n in state["discarded"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise ValueError(f"the ledger's saved state is damaged ({type(e).__name__}: {e})") from e
        self._open = open_groups
        self._in_flight = sum(issued.samples for issued in open_groups.values())
        if self._issued != self._trained + self._discarded.total() + self._in_flight or any(
            not 0 <= i < self._next for i in open_groups
        ):
            raise ValueError(f"the ledger's saved state is damaged: {self._next} groups, {self.summary()}")
        if self._path is not None:
            self._compare(self._path)

    def summary(self) -> str:
        """The totals and the reasons of discarding, in one line."""
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in self._discarded.most_common())
        return (
            f"Samples: {self._issued:,} generated, {self._trained:,} trained, {self._discarded.total():,} discarded"
            f"{f' ({reasons})' if reasons else ''}{f', {self._in_flight:,} in flight' if self._in_flight else ''}"
        )

    def close(self) -> str:
        """Close the file and check the totals. Returns `summary()`."""
        if self.file is not None:
            self.file.close()
        self.check(self._open)
        return self.summary()

    def _compare(self, path: Path) -> None:
        found = audit(path)
        remedy = "resume from an earlier checkpoint, or start again with --fresh"
        if found.wrong is not None:
            raise ValueError(f"{found.wrong}; {remedy}")
        last = found.steps[-1] if found.steps else None
        self._flushed = None if last is None else last.step
        in_file = (last.issued, last.trained, last.discarded, last.in_flight) if last else (0, 0, 0, 0)
        in_state = (self._issued, self._trained, self._discarded.total(), self._in_flight)
        if in_file != in_state or found.unfinished:
            raise ValueError(
                f"{path} ends with {in_file} samples issued, trained, discarded and in "
                f"flight{f' and {found.unfinished} more lines' if found.unfinished else ''}, but the checkpoint's "
                f"ledger has {in_state}: {remedy}"
            )

    def _require_open(self, group_id: int) -> _Issued:
        issued = self._open.get(group_id)
        if issued is None:
            never = not 0 <= group_id < self._next
            why = "was never issued" if never else "was trained or discarded before and was returned again"
            raise RuntimeError(f"ledger: group {group_id} {why}")
        return issued

    def _close(self, closed: _Closed) -> None:
        del self._open[closed.group_id]
        discarded = sum(closed.discarded.values())
        self._trained += len(closed.trained)
        self._discarded.update(closed.discarded)
        self._in_flight -= len(closed.trained) + discarded
        self._closed.append(closed)


def _some(group_ids: Iterable[int]) -> str:
    ordered = sorted(group_ids)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(map(str, ordered[:_LISTED])) + more
