"""A repository with a bug: the policy reads, edits, runs the tests and submits.

The row of a prompt has `files` (path -> text) and `tests` (path -> text of Python, miles_like/sandbox/judging.py). One
action a turn:

    <read>path</read>
    <edit path="path">
    <<<<
    lines to replace
    ====
    new lines
    >>>>
    </edit>
    <test/>
    <submit/>

Edits change the episode's copy of the files; tests can be read, and not edited: each run takes them from the row, in a
process beside the repository's. The reward of `<submit/>` is 1 where all tests pass, else 0. `Repository.outcomes`
counts the kinds of ends of this process.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import ClassVar

from miles_like.limits.regular_files import is_inner_name
from miles_like.sandbox.judging import Judged, judge, modules_of, read_tests
from miles_like.sandbox.make import shared_sandbox
from miles_like.sandbox.program import SandboxLost
from miles_like.types import EnvironmentLost, Observation, Prompt, Sample
from rollout.environments.python_tool import shortened
from rollout.environments.replies import Replies

FORMAT = (
    'Write one action: <read>path</read>, <edit path="path">, <<<<, old lines, ====, new lines, >>>>, </edit>, '
    "<test/>, or <submit/>."
)
_ACTION = re.compile(
    r"<read>(?P<read>.*?)</read>"
    r"|<edit path=\"(?P<path>[^\"]*)\">(?P<edit>.*?)</edit>"
    r"|<(?P<end>test|submit)\s*/>",
    re.DOTALL,
)
_EDIT = re.compile(r"\s*<<<<\n(?P<old>.*?\n|)====\n(?P<new>.*?\n|)>>>>\s*", re.DOTALL)
_MOST_BYTES = 1 << 20  # of the files of an episode
_MOST_NAME, _MOST_PATH = 255, 1024  # bytes; Linux allows the first in a part of a path, and more than the second


class Repository(Replies):
    """Protocol: MakeEnvironment; its instances are Environments."""

    # solved; unchanged: nothing was edited; broken: no test passes, or a limit ended them; regression: a test fails
    # that passed before; failing: a test still fails
    outcomes: ClassVar[Counter[str]] = Counter()

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.files, self._tests = _texts(prompt, "files"), _texts(prompt, "tests")
        self._given, self._prompt = dict(self.files), prompt
        self._before: Judged | None = None  # of the files as they were given
        self.refused = Counter[str]()  # edits that were not made, by reason
        self.outcome = ""  # of `submit`

    async def __call__(self, sample: Sample, turn: str) -> Observation:
        action = _ACTION.search(turn.rpartition("</think>")[2])
        if action is None:
            return self.reply(FORMAT)
        if action["read"] is not None:
            path = action["read"].strip()
            found = self.files.get(path, self._tests.get(path))
            known = ", ".join([*self.files, *self._tests])
            return self.reply(f"There is no file {path[:80]!r}. Files: {known}" if found is None else shortened(found))
        if action["edit"] is not None:
            return self.reply(self.edit(action["path"], action["edit"]))
        judged = await self._judge(self.files)
        if action["end"] == "test":
            return self.reply(_report(judged))
        self.outcome = await self._outcome(judged)
        self.outcomes[self.outcome] += 1
        return Observation(ends=True, reward=float(self.outcome == "solved"))

    def edit(self, path: str, text: str) -> str:
        """Replace lines of a file, or make one where the old lines are empty. Returns what the policy is shown."""
        change = _EDIT.fullmatch(text)
        if change is None:
            return self._refuse("form", "The edit has no lines <<<<, ====, >>>> in this order.")
        if not is_inner_name(path):
            return self._refuse("path", f"{path[:80]!r} is no path in the repository.")
        path = str(PurePosixPath(path))  # one name for each file
        if path in self._tests or path.startswith("tests/"):
            return self._refuse("tests", "Tests cannot be edited.")
        if path not in self.files and not self._has_room(path):
            return self._refuse("path", f"There can be no file {path[:80]!r}: its name is too long, or taken.")
        old, new, had = change["old"], change["new"], self.files.get(path)
        if had is None and old:
            return self._refuse("file", f"There is no file {path[:80]!r}.")
        if had is not None and (not old or had.count(old) != 1):
            times = had.count(old) if old else 0
            return self._refuse("lines", f"The old lines are {times} times in {path}, and must be there once.")
        after = new if had is None else had.replace(old, new)
        size = sum(len(t.encode()) for t in self.files.values()) + len(after.encode())
        if size > _MOST_BYTES:
            return self._refuse("size", f"The repository would have more than {_MOST_BYTES} bytes.")
        self.files[path] = after
        return f"{path} is changed."

    def _has_room(self, path: str) -> bool:
        """Whether a new file can be there: no folder has its name, and no file that of one of its folders."""
        folders = {str(folder) for folder in PurePosixPath(path).parents}
        short = len(path.encode()) <= _MOST_PATH and all(len(p.encode()) <= _MOST_NAME for p in path.split("/"))
        taken = folders & self.files.keys() or any(file.startswith(f"{path}/") for file in self.files)
        return short and not taken

    def _refuse(self, reason: str, text: str) -> str:
        self.refused[reason] += 1
        return text

    async def _judge(self, files: Mapping[str, str]) -> Judged:
        """Raises EnvironmentLost where the sandbox is lost."""
        tests = read_tests(list(self._tests.values()))
        own = modules_of(self._given)  # tests see no module that the policy has added, such as its own math.py
        try:
            return await judge(
                shared_sandbox(), "", tests, files={p: t.encode() for p, t in files.items()}, modules=own
            )
        except SandboxLost as e:
            raise EnvironmentLost(f"the sandbox was lost: {e}") from e

    async def _outcome(self, judged: Judged) -> str:
        if judged.passed == judged.tests:
            return "solved"
        if self.files == self._given:
            return "unchanged"
        if judged.ended or judged.passed == 0:
            return "broken"
        if self._before is None:
            self._before = await self._judge(self._given)
        return "regression" if judged.failures.keys() - self._before.failures.keys() else "failing"


def _report(judged: Judged) -> str:
    lines = [f"{judged.passed} of {judged.tests} tests pass."]
    lines += [f"FAILED {name}: {why}" for name, why in list(judged.failures.items())[:10]]
    return shortened("\n".join(lines))


def _texts(prompt: Prompt, column: str) -> dict[str, str]:
    found = prompt.meta.get(column)
    if not isinstance(found, Mapping) or not found or not all(isinstance(text, str) for text in found.values()):
        raise ValueError(
            f"prompt {prompt.id!r} has no column {column!r} with paths and texts: see docs/environments.md"
        )
    return {str(path): str(text) for path, text in found.items()}
