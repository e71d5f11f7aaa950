"""The cells of the fault matrix: which role is struck, when, by what, and what must happen. No process is started here.

`RULES` is the expectation: the first rule that fits a cell says its outcome. A recovery that becomes better is one edit
there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tests.support.covering import Row, covering_rows

ROLES = {
    "driver": "the process of the command",
    "rank": "the last of two trainer ranks",
    "server head": "rank 0 of the second of two rollout servers: HTTP, scheduler, sampler",
    "server part": "rank 1 of that server, which then has two",
    "teacher": "the server of a teacher, which the run started",
    "reward": "an HTTP service outside of the run, which something else starts again after 6 s",
    "node": "the second of two nodes, with one rank and one server",
    "Ray head": "Ray's GCS process on the first node",
}
MOMENTS = {
    "idle": "all parts are up, no prompt is admitted",
    "generating": "a server has sampled five tokens or more under version 1; requests run",
    "mid-step": "the optimizer's fp32 weights have moved, those of the model have not",
    "mid-publish": "two requests with weights of version 1 were answered, more follow",
    "mid-save": "a rank has written one of its files of the checkpoint, not all",
    "asleep": "servers and trainer take turns; the servers have released their memory, the ranks are not awake",
    "resuming": "the run is resumed, and a rank is about to read its checkpoint",
}
KINDS = {
    "SIGKILL": "the process is killed",
    "SIGSTOP": "the process is stopped and never goes on",
    "garbage": "what it answers, computes or has written is nonsense from here on",
    "slow": "it runs 10 ms of every 100 ms, for 20 s",
    "partition": "nothing reaches it and nothing leaves it for 60 s",
    "disk full": "what it writes to disk fails with ENOSPC",
    "disk hung": "what it writes to disk never returns",
    "out of memory": "MemoryError at its next operation",
    "device out of memory": "torch.OutOfMemoryError at its next operation",
    "clock jump": "its wall clock is a day ahead (libfaketime)",
    "bit flip": "one bit of a mantissa of the weights that it serves flips",
}
SIGNALS = ("SIGKILL", "SIGSTOP")
Ground = Literal["plain", "spread"]
Outcome = Literal["goes on", "is restarted", "ends"]
OUTCOMES: dict[Outcome, str] = {
    "goes on": "the same driver process completes the run",
    "is restarted": "the driver is gone, or hangs and is killed from outside; --supervise starts another, which "
    "completes the run",
    "ends": "the command ends with one sentence; --resume completes the run",
}
Part = Literal["driver", "ranks", "server", "teacher"]

# beside those that two of role, moment and kind ask for: the nearest to what is known from large runs
ALSO = (
    ("driver", "mid-save", "disk full"),
    ("rank", "mid-step", "device out of memory"),
    ("server head", "generating", "bit flip"),
    ("server head", "generating", "garbage"),
    ("server part", "generating", "bit flip"),
)

# (role, kind) that no process can show, or that another cell is
NO_MEMORY = "it holds no device memory"
NO_WEIGHTS = "it serves no weights"
NO_FILES = "it writes no file"
OF_PROCESSES = "nothing of a node but its processes: see their cells"
OF_RAY = "Ray's process has its own protocol, files and allocator, which the project does not touch"
IMPOSSIBLE: dict[tuple[str, str], str] = {
    ("driver", "device out of memory"): NO_MEMORY,
    ("driver", "bit flip"): NO_WEIGHTS,
    ("rank", "bit flip"): "what it holds is the policy; a flip there is published as it is, with its own checksum",
    ("server part", "disk full"): NO_FILES,
    ("server part", "disk hung"): NO_FILES,
    ("reward", "disk full"): "its disk is its own: it answers 5xx, which is garbage",
    ("reward", "disk hung"): "its disk is its own: it does not answer, which is SIGSTOP",
    ("reward", "device out of memory"): NO_MEMORY,
    ("reward", "bit flip"): NO_WEIGHTS,
    **{
        ("node", kind): OF_PROCESSES
        for kind in ("garbage", "disk full", "disk hung", "out of memory", "device out of memory", "clock jump")
    },
    ("node", "bit flip"): OF_PROCESSES,
    **{("Ray head", kind): OF_RAY for kind in ("garbage", "disk full", "disk hung", "out of memory", "clock jump")},
    ("Ray head", "device out of memory"): NO_MEMORY,
    ("Ray head", "bit flip"): NO_WEIGHTS,
}
# (role, moment, kind), "*" for any
IMPOSSIBLE_AT: dict[tuple[str, str, str], str] = {
    ("*", "asleep", "bit flip"): "a server that has released its weights has none",
    ("teacher", "asleep", "bit flip"): "",  # it never releases them: possible
}


@dataclass(frozen=True, order=True)
class Cell:
    """One fault."""

    role: str
    moment: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.role} / {self.moment} / {self.kind}"

    @property
    def ground(self) -> Ground:
        """What the cell is played on. Plain processes stand in for Ray's actors: what strikes nodes is played with Ray,
        and ranks that do not answer in mid-step, too."""
        hangs = self.role == "rank" and self.moment == "mid-step" and self.kind in ("SIGSTOP", "partition", "disk hung")
        return "spread" if hangs or self.role in ("node", "Ray head") else "plain"

    @staticmethod
    def named(name: str) -> Cell:
        role, moment, kind = name.split(" / ")
        return Cell(role, moment, kind)


class Must(NamedTuple):
    """What must happen."""

    outcome: Outcome
    why: str
    replaced: tuple[Part, ...] = ()  # parts that are other processes at the end of the run; all others stay
    bitwise: bool = True  # a deterministic run ends as the undisturbed one; False: `why` says what differs


class Rule(NamedTuple):
    """Names, or "*"; several with "|" between them."""

    role: str
    moment: str
    kind: str
    must: Must

    def fits(self, cell: Cell) -> bool:
        pairs = ((self.role, cell.role), (self.moment, cell.moment), (self.kind, cell.kind))
        return all(names == "*" or name in names.split("|") for names, name in pairs)


SERVERS = "server head|server part"
LEFT = "the row of ranks on the other node goes on, equal but for rounding"
OUT_OF_MEMORY = "out of memory|device out of memory"
RULES = (
    # harmless: nothing depends on the wall clock, and a slow process is waited for
    Rule("*", "*", "slow", Must("goes on", "it is slower only")),
    Rule("*", "*", "clock jump", Must("goes on", "time limits are of the monotonic clock")),
    Rule("server head|teacher", "*", "disk full|disk hung", Must("goes on", "a server writes only its log")),
    Rule("driver", "*", "SIGKILL", Must("is restarted", "--supervise resumes it", ("driver",))),
    Rule("driver", "*", "SIGSTOP|disk hung", Must("is restarted", "a scheduler kills what hangs", ("driver",))),
    Rule("driver", "*", "partition", Must("goes on", "its servers and ranks wait for it")),
    Rule("driver", "*", "garbage", Must("ends", "the last checkpoint is refused; the one before is resumed")),
    Rule("driver", "*", "*", Must("ends", "an error with a sentence would come again")),
    Rule("rank", "*", "SIGKILL|SIGSTOP|partition|disk hung", Must("goes on", "ranks are rebuilt", ("ranks",))),
    Rule("rank", "*", "*", Must("ends", "an error of a rank would come again: it is no loss")),
    Rule(SERVERS, "asleep", "*", Must("ends", "no server is replaced where servers and trainer take turns")),
    Rule(SERVERS, "generating", "bit flip", Must("ends", "its hashes differ before its samples are trained")),
    Rule(SERVERS, "*", "bit flip", Must("goes on", "its answer to the known text differs: it is published to again")),
    Rule(SERVERS, "*", "garbage", Must("ends", "a reply that is no answer is an error of a program, not of a machine")),
    Rule(SERVERS, "*", "*", Must("goes on", "another takes its place; its requests are sampled again", ("server",))),
    Rule(
        "teacher", "*", "bit flip", Must("goes on", "nothing knows a teacher's right answers: not noticed", (), False)
    ),
    Rule("teacher", "*", "garbage", Must("ends", "a reply that is no answer is an error of a program")),
    Rule("teacher", "*", "*", Must("goes on", "its server is restarted and asked again", ("teacher",))),
    Rule("reward", "*", "garbage", Must("ends", "a reply that is no score is an error of a program")),
    Rule("reward", "*", "*", Must("goes on", "the request is sent again until the service is back")),
    Rule("node", "asleep", "*", Must("goes on", f"{LEFT} while its server sleeps", ("ranks",), False)),
    Rule("node", "*", "*", Must("goes on", f"{LEFT}, and its server is started again", ("ranks", "server"), False)),
    Rule("Ray head", "*", "partition", Must("goes on", "calls between actors do not pass through the head")),
    Rule("Ray head", "*", "*", Must("ends", "the cluster is lost with it")),
)


def must(cell: Cell) -> Must:
    return next(rule.must for rule in RULES if rule.fits(cell))


def why_impossible(role: str, moment: str, kind: str) -> str:
    """Empty: the cell is possible."""
    if why := IMPOSSIBLE.get((role, kind), ""):
        return why
    for key in ((role, moment, kind), ("*", moment, kind)):
        if key in IMPOSSIBLE_AT:
            return IMPOSSIBLE_AT[key]
    return ""


def _possible(row: Row) -> bool:
    return not why_impossible(row["role"], row["moment"], row["kind"])


@functools.cache
def cells() -> tuple[Cell, ...]:
    """Every role at every moment with both signals; the other kinds so that any two of role, moment and kind meet. The
    same at each call."""
    signals = [Cell(role, moment, kind) for role in ROLES for moment in MOMENTS for kind in SIGNALS]
    others = [kind for kind in KINDS if kind not in SIGNALS]
    rows = covering_rows({"role": list(ROLES), "moment": list(MOMENTS), "kind": others}, _possible)
    found = {*signals, *(Cell(row["role"], row["moment"], row["kind"]) for row in rows), *(Cell(*c) for c in ALSO)}
    order = [list(ROLES), list(MOMENTS), list(KINDS)]
    return tuple(
        sorted(
            found, key=lambda c: [names.index(x) for names, x in zip(order, (c.role, c.moment, c.kind), strict=True)]
        )
    )


def left_out() -> Iterator[tuple[str, str, str]]:
    """(role, kind, why) of what is not played, then those of single moments with the moment before the kind."""
    for (role, kind), why in IMPOSSIBLE.items():
        yield role, kind, why
    for (role, moment, kind), why in IMPOSSIBLE_AT.items():
        if why:
            yield ("any server" if role == "*" else role), f"{moment}, {kind}", why
