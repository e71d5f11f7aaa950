"""Scores for responses: functions by name, or by import path.

A reward that raises ends the run: a wrong score would train without a word.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

from miles_like.protocols import RewardFn
from miles_like.types import Finish, Prompt, Sample

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_GROUPED_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")
_GSM8K_MARK = "####"


async def exact_number(prompt: Prompt, sample: Sample) -> float:
    """1 when the whole response, stripped, is a decimal number equal to the answer and the model stopped by itself.

    `24`, `24.0` and `+24` are equal; `24 apples`, `2.4e1` and a response cut at the token limit score 0.
    """
    text = sample.text.strip()
    if sample.finish is not Finish.STOP or not _NUMBER.fullmatch(text):
        return 0.0
    return float(Decimal(text) == _gold_number(prompt))


async def gsm8k(prompt: Prompt, sample: Sample) -> float:
    """1 when the number after the response's last `####`, or else its last number, equals the answer's.

    Commas within numbers do not matter. The answer may be GSM8K's whole solution, `... #### 72`.
    """
    tail = sample.text.rsplit(_GSM8K_MARK, 1)
    found = _GROUPED_NUMBER.findall(tail[-1])
    if not found:
        return 0.0
    number = found[0] if len(tail) == 2 else found[-1]
    return float(Decimal(number.replace(",", "")) == _gold_number(prompt))


def _gold(prompt: Prompt) -> str:
    gold = prompt.answer.rsplit(_GSM8K_MARK, 1)[-1].strip()
    if not gold:
        raise ValueError(f"prompt {prompt.id!r} has no answer to compare with: set data.answer_key to its column")
    return gold


def _gold_number(prompt: Prompt) -> Decimal:
    text = _gold(prompt).replace(",", "")
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"prompt {prompt.id!r} has the answer {text!r}, which is no number: use reward math_verify")
    return Decimal(text)


class MathVerify:
    """math-verify's equality of mathematical expressions, in a process of its own with a time limit.

    An answer that is not judged within `limit_s` scores 0: the process is killed and the next call starts another.
    An instance belongs to one event loop; calls wait for each other.
    """

    def __init__(self, *, limit_s: float = 10.0, start_limit_s: float = 120.0) -> None:
        self.limit_s = limit_s
        self._start_limit_s = start_limit_s
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self.timeouts = 0

    async def __call__(self, prompt: Prompt, sample: Sample) -> float:
        """1 for an expression equal to the answer, else 0. Raises ValueError when the answer itself is none."""
        request = json.dumps({"gold": _gold(prompt), "answer": sample.text}).encode() + b"\n"
        async with self._lock:
            process = self._process or await self._start()
            # Kept only once it has replied: after a time limit or a cancelled call, a late reply would be taken for
            # that of the next question.
            self._process = None
            try:
                reply = await self._exchange(process, request)
                self._process = process
            except TimeoutError:
                self.timeouts += 1
                return 0.0
            finally:
                if self._process is None:
                    _kill(process)
        if "error" in reply:
            raise ValueError(f"prompt {prompt.id!r}: {reply['error']}")
        return float(bool(reply["right"]))

    async def close(self) -> None:
        """End the process. A later call starts another."""
        async with self._lock:
            if self._process is not None:
                _kill(self._process)
                await self._process.wait()
                self._process = None

    async def _start(self) -> asyncio.subprocess.Process:
        # -P: the script's own folder stays off the path, where our types.py would hide the standard one.
        worker = Path(__file__).with_name("math_worker.py")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", str(worker), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        ready = b""
        try:
            async with asyncio.timeout(self._start_limit_s):
                ready = await process.stdout.readline()
        finally:
            if not ready:
                _kill(process)
        if not ready:
            raise RuntimeError("the math-verify process ended before it was ready: see its message on stderr")
        return process

    async def _exchange(self, process: asyncio.subprocess.Process, request: bytes) -> dict[str, object]:
        assert process.stdin is not None and process.stdout is not None
        async with asyncio.timeout(self.limit_s):
            process.stdin.write(request)
            await process.stdin.drain()
            line = await process.stdout.readline()
        if not line:
            raise RuntimeError(f"the math-verify process ended on {request!r}: see its message on stderr")
        reply: dict[str, object] = json.loads(line)
        return reply


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()


REWARDS: dict[str, Callable[[], RewardFn]] = {
    "exact_number": lambda: exact_number,
    "gsm8k": lambda: gsm8k,
    "math_verify": MathVerify,
}


def load_reward(name: str) -> RewardFn:
    """A function of REWARDS, or `package.module:function`, an `async def f(prompt, sample) -> float` of your own.

    Raises ValueError for an unknown name (with the nearest), a missing module or attribute, or one that is not async.
    """
    if ":" not in name:
        if name in REWARDS:
            return REWARDS[name]()
        near = difflib.get_close_matches(name, REWARDS, n=1, cutoff=0.0)
        raise ValueError(
            f"unknown reward.name {name!r}: did you mean {near[0]!r}? Known: {', '.join(REWARDS)}, package.module:name"
        )
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as e:
        raise ValueError(f"reward.name {name!r}: {e}; check that it can be imported from here") from e
    function: RewardFn | None = getattr(module, attribute, None)
    if function is None:
        raise ValueError(f"reward.name {name!r}: module {module_name} has no {attribute!r}")
    if not any(inspect.iscoroutinefunction(f) for f in (function, type(function).__call__)):
        raise ValueError(f"reward.name {name!r} is not async: write `async def {attribute}(prompt, sample) -> float`")
    return function
