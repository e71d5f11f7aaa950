"""Every sample's life: issued once, then trained once or discarded once with a reason.

A sample is (ticket, index): a prompt that is admitted to generation gets the next ticket, 0, 1, 2, ... over the whole
run, and its samples are 0 .. n-1. Whatever does not fit is a RuntimeError in one sentence, and leaves the ledger as it
was: a sample that is trained twice counts double in a gradient, one that is lost biases what is learnt towards the
answers that came back, and neither shows in any curve.

`ledger.jsonl` has a line for each ticket that was closed, in the order of tickets, and after those of a step one with
the totals since the run began (ledger_audit.py reads it alone):

    {"step":2,"ticket":8,"prompt":"p8","trained":[0,1,3],"discarded":{"no reward within 60 s":1}}
    {"step":2,"tickets":12,"issued":48,"trained":31,"discarded":5,"in_flight":12}
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from miles_like.appended_file import AppendedFile
from miles_like.ledger_audit import audit
from miles_like.types import Json, SampleGroup

_NAMED = 8  # tickets that a message lists


class _Issued(NamedTuple):
    prompt: str
    samples: int


class _Closed(NamedTuple):
    ticket: int
    prompt: str
    step: int | None  # that trained it; None: all its samples were discarded
    trained: tuple[int, ...]  # indices, ascending
    discarded: dict[str, int]  # reason -> samples


class Ledger:
    """For one event loop. `path`: the file, appended to; None: none is written."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.file = None if path is None else AppendedFile(path)
        self._next = 0  # ticket
        self._open: dict[int, _Issued] = {}
        self._in_flight = 0  # samples
        self._issued = 0
        self._trained = 0
        self._discarded: Counter[str] = Counter()
        self._closed: list[_Closed] = []  # since the last flush
        self._flushed: int | None = None  # step

    def issue(self, ticket: int, prompt_id: str, samples: int) -> None:
        """Samples 0 .. samples-1 of a prompt are asked for. RuntimeError when it is not the next ticket's turn."""
        if ticket != self._next or samples < 1:
            why = "was issued before" if ticket < self._next else f"comes before ticket {self._next}"
            why = why if samples > 0 else f"has {samples} samples"
            raise RuntimeError(f"ledger: ticket {ticket} (prompt {prompt_id!r}) {why}")
        self._next += 1
        self._open[ticket] = _Issued(prompt_id, samples)
        self._issued += samples
        self._in_flight += samples

    def discard(self, ticket: int, reason: str, *, given_up: Mapping[str, int] | None = None) -> None:
        """No sample of the ticket is trained. `given_up`: those of them that had ended for a reason of their own, as
        SampleGroup.discarded counts them; the others are discarded for `reason`.

        RuntimeError when the ticket is not open, or more were given up than issued.
        """
        issued = self._of(ticket)
        reasons = Counter(given_up or {})
        rest = issued.samples - reasons.total()
        if rest < 0 or any(n < 1 for n in reasons.values()):
            raise RuntimeError(
                f"ledger: ticket {ticket} (prompt {issued.prompt!r}) has {issued.samples} samples, of which "
                f"{dict(reasons)} were given up"
            )
        self._close(_Closed(ticket, issued.prompt, None, (), dict(reasons + Counter({reason: rest}))))

    def train(self, step: int, ticket: int, group: SampleGroup) -> None:
        """The samples of `group` are trained, and those that `group.discarded` counts are discarded.

        step: as in metrics.jsonl, of the row that the training ends in. RuntimeError when the ticket was closed before
        or never issued, when the prompt is another one, and when the samples are not each of those issued, once.
        """
        issued = self._of(ticket)
        what = f"ledger: ticket {ticket} (prompt {issued.prompt!r})"
        prompts = {group.prompt.id, *(s.prompt_id for s in group.samples)}
        if prompts != {issued.prompt}:
            raise RuntimeError(f"{what} came back with prompt {min(prompts - {issued.prompt})!r}")
        indices = sorted(s.index for s in group.samples)
        twice = [i for i, n in Counter(indices).items() if n > 1]
        if twice:
            raise RuntimeError(f"{what} came back with sample {twice[0]} twice")
        unknown = [i for i in indices if not 0 <= i < issued.samples]
        if unknown:
            raise RuntimeError(f"{what} came back with sample {unknown[0]}, but 0 .. {issued.samples - 1} were issued")
        given_up = sum(group.discarded.values())
        if len(indices) + given_up != issued.samples or any(n < 1 for n in group.discarded.values()):
            raise RuntimeError(
                f"{what} has {issued.samples} samples and came back with {len(indices)} to train and {given_up} "
                f"discarded ({dict(group.discarded)})"
            )
        self._close(_Closed(ticket, issued.prompt, step, tuple(indices), dict(group.discarded)))

    def check(self, open_tickets: Collection[int]) -> None:
        """RuntimeError unless those are the open tickets, and issued = trained + discarded + in flight."""
        held = set(open_tickets)
        if lost := self._open.keys() - held:
            raise RuntimeError(f"ledger: the loop lost open tickets {_some(lost)}: their samples are nowhere")
        if again := held - self._open.keys():
            raise RuntimeError(f"ledger: the loop holds tickets {_some(again)}, which are closed or were never issued")
        in_flight = sum(i.samples for i in self._open.values())
        if in_flight != self._in_flight or self._issued != self._trained + self._discarded.total() + in_flight:
            raise RuntimeError(f"ledger: {self.summary()} is no equation: a sample was lost or counted twice")

    def metrics(self) -> dict[str, float]:
        """Samples, since the run began."""
        return {
            "ledger/issued": float(self._issued),
            "ledger/trained": float(self._trained),
            "ledger/discarded": float(self._discarded.total()),
            "ledger/in_flight": float(self._in_flight),
        }

    def flush(self, step: int) -> None:
        """At a step's boundary: what was closed since the last one, and the totals, in one write to the file. Once more
        after it where the prompts have ended: what was left over, if anything was."""
        assert all(c.step in (None, step) for c in self._closed), f"a ticket of another step than {step}"
        again, self._flushed = step == self._flushed, step
        if again and not self._closed:
            return
        lines: list[Mapping[str, Json]] = [
            {
                "step": step,
                "ticket": c.ticket,
                "prompt": c.prompt,
                "trained": c.trained,
                "discarded": dict(sorted(c.discarded.items())),
            }
            for c in sorted(self._closed)
        ]
        totals = {"trained": self._trained, "discarded": self._discarded.total(), "in_flight": self._in_flight}
        lines.append({"step": step, "tickets": self._next, "issued": self._issued, **totals})
        self._closed.clear()
        if self.file is not None:
            self.file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in lines))

    def state(self) -> Json:
        """As of a step's boundary, when all is flushed."""
        assert not self._closed, f"{len(self._closed)} tickets were closed and not flushed"
        return {
            "next": self._next,
            "issued": self._issued,
            "trained": self._trained,
            "discarded": dict(self._discarded),
            "open": [[ticket, *issued] for ticket, issued in self._open.items()],
        }

    def restore(self, state: Any) -> None:
        """Go on from a saved `state()`, with the file as it was then. Raises ValueError when that is no such state, and
        when the file is damaged or does not end with the same totals."""
        assert not self._next, f"{self._next} tickets were issued: restore into a new ledger"
        try:
            tickets = {int(t): _Issued(str(prompt), int(n)) for t, prompt, n in state["open"]}
            self._next, self._issued, self._trained = (int(state[key]) for key in ("next", "issued", "trained"))
            self._discarded = Counter({str(reason): int(n) for reason, n in state["discarded"].items()})
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise ValueError(f"the ledger's saved state is damaged ({type(e).__name__}: {e})") from e
        self._open = tickets
        self._in_flight = sum(i.samples for i in tickets.values())
        if self._issued != self._trained + self._discarded.total() + self._in_flight or any(
            not 0 <= t < self._next for t in tickets
        ):
            raise ValueError(f"the ledger's saved state is damaged: {self._next} tickets, {self.summary()}")
        if self._path is not None:
            self._compare(self._path)

    def summary(self) -> str:
        """One line: where all samples went."""
        reasons = ", ".join(f"{n} {reason}" for reason, n in self._discarded.most_common())
        return (
            f"{self._issued} samples issued = {self._trained} trained + {self._discarded.total()} discarded"
            f"{f' ({reasons})' if reasons else ''} + {self._in_flight} in flight"
        )

    def close(self) -> str:
        """Checks once more and closes the file; returns `summary()`."""
        if self.file is not None:
            self.file.close()
        self.check(self._open)
        return self.summary()

    def _compare(self, path: Path) -> None:
        found = audit(path)
        remedy = "resume from a checkpoint before it was changed, or use --fresh"
        if found.wrong is not None:
            raise ValueError(f"{found.wrong}; {remedy}")
        last = found.steps[-1] if found.steps else None
        self._flushed = None if last is None else last.step
        says = (last.issued, last.trained, last.discarded, last.in_flight) if last else (0, 0, 0, 0)
        holds = (self._issued, self._trained, self._discarded.total(), self._in_flight)
        if says != holds or found.unfinished:
            raise ValueError(
                f"{path} ends with {says} samples issued, trained, discarded and in flight"
                f"{f' and {found.unfinished} more lines' if found.unfinished else ''}, the checkpoint's ledger has "
                f"{holds}: {remedy}"
            )

    def _of(self, ticket: int) -> _Issued:
        issued = self._open.get(ticket)
        if issued is None:
            never = not 0 <= ticket < self._next
            why = "was never issued" if never else "was trained or discarded before and came back once more"
            raise RuntimeError(f"ledger: ticket {ticket} {why}")
        return issued

    def _close(self, closed: _Closed) -> None:
        del self._open[closed.ticket]
        discarded = sum(closed.discarded.values())
        self._trained += len(closed.trained)
        self._discarded.update(closed.discarded)
        self._in_flight -= len(closed.trained) + discarded
        self._closed.append(closed)


def _some(tickets: Iterable[int]) -> str:
    listed = sorted(tickets)
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return ", ".join(map(str, listed[:_NAMED])) + more
