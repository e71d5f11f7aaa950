"""The table of answers and verdicts in docs/rewards.md, row by row, and the limits of the process that judges them.

Numbers are compared with Python's Decimal and Fraction, formulas with math-verify as it is published. Not covered:
whether math-verify is right about formulas.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import math_verify
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_like.protocols import SampleReward
from miles_like.rewards.maths import answer_text, math_worker
from miles_like.rewards.maths.answers import exact_number, gsm8k
from tests.fuzz.pool import watchdog
from tests.support.chosen import later
from tests.support.made_samples import group, sample

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "rewards.md").read_text()
TABLE = re.findall(r"^\| ([\w ]+) \| `(.*?)` \| `(.*?)` \| (.) \| (.) \| (.) \| (.*?) ?\|$", PAGE, re.MULTILINE)
KINDS = {"dollars", "answer tags", "Unicode minus", "exponents", "repeating decimals", "thousands", "inequalities"}
KINDS |= {"alternatives", "ordinary"}
WORKER = Path(math_worker.__file__)


def verdict(reward: SampleReward, gold: str, response: str) -> str:
    s = sample(text=response)
    try:
        return str(int(asyncio.run(reward(group([s], answer=gold).prompt, s))))  # type: ignore[arg-type]
    except ValueError as e:
        assert "reward math_verify" in str(e)
        return "–"


def test_the_table_has_every_kind() -> None:
    counted = Counter(kind for kind, *_ in TABLE)
    assert counted.keys() == KINDS and min(counted.values()) >= 8 and len(TABLE) >= 100
    assert len({(gold, response) for _, gold, response, *_ in TABLE}) == len(TABLE)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[1]} {row[2]}")
def test_a_row(row: tuple[str, ...]) -> None:
    _, gold, response, *want, _ = row
    response = response.replace("⏎", "\n")
    judged = math_worker.compare(gold, response)
    assert [
        verdict(exact_number, gold, response),
        verdict(gsm8k, gold, response),
        str(int(bool(judged["right"]))),
    ] == want


def test_boxes_and_formulas_are_judged_as_math_verify_judges_them() -> None:
    """Where it reads them as they are meant, which leaves out the kinds that the table is about."""
    rows = [
        r
        for r in TABLE
        if r[0] in ("ordinary", "inequalities") and re.search(r"\\boxed|\$", r[2]) and "####" not in r[2]
    ]
    assert len(rows) >= 10
    for _, gold, response, _, _, want, _ in rows:
        stock = math_verify.verify(math_verify.parse(f"${gold}$"), math_verify.parse(response))
        assert str(int(stock)) == want, (gold, response)


DECIMALS = st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**9), max_value=10**9, places=4)


@given(value=DECIMALS, form=st.sampled_from(["{}", "${}$", "\\${}", "{} dollars", " {} "]))
def test_numbers_have_their_exact_value(value: Decimal, form: str) -> None:
    for text in (
        f"{value:f}",
        f"{value:,}",
        f"{value:f}".replace("-", "\u2212"),
        f"{value:,}".replace(",", "\\,"),
        f"{value:e}",
    ):
        if "\\$" in form and value.is_signed():
            continue  # -$5, not $-5
        assert answer_text.number_of(form.format(text)) == Fraction(value), form.format(text)


@given(whole=st.integers(0, 99), once=st.integers(0, 999), again=st.integers(1, 999))
def test_repeating_decimals_have_their_exact_value(whole: int, once: int, again: int) -> None:
    """The value is the limit of its decimals: 300 of them leave less than 10**-298."""
    value = answer_text.number_of(f"{whole}.{once}\\overline{{{again}}}")
    assert value is not None
    digits = (str(once) + str(again) * 300)[:300]
    assert 0 <= value - Fraction(f"{whole}.{digits}") < Fraction(1, 10**298)


@pytest.mark.parametrize("text", ["1e999999999", "9" * 5000, "0." + "3" * 5000, "1e-400000", "", "5 6", "--5", "x"])
def test_what_is_no_number_or_too_long_has_no_value(text: str) -> None:
    assert answer_text.number_of(text) is None


QUICK = ("1", ",111", " ", "<answer>", "$ ", "####", "\\boxed{", "-", "**", "*5* ", "US$")
SLOW = ("1e", "5 or ", "1.", "1 * 10^")  # two to six seconds each
LONG = 60_000  # characters, of which a pattern with quadratic time would not see the end


@pytest.mark.parametrize(
    "piece",
    [*QUICK, *later(SLOW, (), beside="tests/miles_like/rewards/maths/test_answer_table.py")],
)
def test_a_long_response_is_read_to_its_end(piece: str) -> None:
    """Every reader ends: with quadratic time it would take minutes, and the watchdog would end it with an error."""
    text = piece * (LONG // len(piece))
    with watchdog(60.0):
        for read in (answer_text.plain_signs, answer_text.given, answer_text.boxed, answer_text.for_latex):
            read(text)
        answer_text.for_prose(text), answer_text.in_tags(text), answer_text.last_alternatives(text)
        answer_text.alternatives(text), answer_text.is_formula(text), answer_text.number_of(text)
        answer_text.last_number(text, first=False), answer_text.last_number(text, first=True)


# the process


def worker(parent: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", str(WORKER), str(parent)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


BOMB = "$9^{9^{9^{9}}}$"
# starts a worker as `MathVerify` does, without its imports of torch
PARENT = f"""
import json, os, subprocess, sys
command = [sys.executable, "-P", {str(WORKER)!r}, str(os.getpid())]
worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
worker.stdout.readline()
print(json.dumps(dict(gold="4", answer={BOMB!r}, limit_s=120)), file=worker.stdin, flush=True)
print(worker.pid, flush=True)
worker.wait()
"""


def test_the_worker_ends_with_a_parent_that_is_killed() -> None:
    """In the middle of 9^9^9^9, which no message reaches."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    judging = psutil.Process(int(parent.stdout.readline()))
    try:
        before = judging.cpu_times().user
        while judging.cpu_times().user < before + 0.3:
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs([judging], timeout=10)
    for process in alive:
        process.kill()
    assert not alive


def test_a_worker_whose_parent_is_gone_does_not_start() -> None:
    """The parent may end before the worker has asked to be ended with it."""
    ended = worker(1)
    out, err = ended.communicate(timeout=60)
    assert ended.returncode == 1 and not out and "the process that started this worker has ended" in err


def test_the_worker_has_limits_of_memory_and_of_time() -> None:
    """Its own, so that a parent that was stopped does not leave a process computing for ever."""
    process = worker(os.getpid())
    assert process.stdin is not None and process.stdout is not None
    assert json.loads(process.stdout.readline()) == {"ready": True}
    limits = resource.prlimit(process.pid, resource.RLIMIT_AS)
    assert limits[0] == 2 << 30
    process.stdin.write(json.dumps({"gold": "4", "answer": BOMB, "limit_s": 0.2}) + "\n")
    process.stdin.flush()
    assert process.wait(60) == -signal.SIGXCPU and not process.stdout.read()
    for pipe in (process.stdin, process.stdout, process.stderr):
        assert pipe is not None
        pipe.close()
