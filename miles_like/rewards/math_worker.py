"""A process that checks mathematical answers, one JSON line in, one JSON line out.

`python -P math_worker.py PARENT_PID`. It runs as a program, not as a module, and starts without torch; its parent can
kill it, which nothing less can do to an expression like 9**9**9**9 that keeps the interpreter inside one C call. It
ends with its parent (PR_SET_PDEATHSIG) and is limited to 2 GiB of address space and, for each question, to twice the
parent's time limit in CPU seconds.
"""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # of miles_like, wherever it is installed

from math_verify import parse, verify

from miles_like.child_limits import end_with, lower
from miles_like.rewards import answer_text

# The parent keeps the time. math-verify's own limits end in "not equal", which would be a 0 that nobody meant.
PARSING = {"parsing_timeout": None}
VERIFYING = {"timeout_seconds": None}
MEMORY = 2 << 30  # bytes of address space; with all imports 0.2 GiB are used


def judge(gold: str, answer: str) -> dict[str, object]:
    """{"right": bool} or, when the gold answer itself does not parse, {"error": why}.

    Alternatives ("5 or 6") are compared as sets: each of the response's must equal one of the gold's, and each of the
    gold's one of the response's. Numbers are compared exactly, everything else by math-verify.
    """
    golds = answer_text.alternatives(gold)
    if not golds or not all(_readable(one) for one in golds):
        return {"error": f"the reference answer {gold[:200]!r} is no mathematical expression"}
    marked = answer_text.given(answer)
    if marked is not None:
        return {"right": _of_marked(golds, *marked)}
    if (boxed := answer_text.boxed(answer)) is not None:
        return {"right": _same(golds, [f"\\boxed{{{part}}}" for part in answer_text.alternatives(boxed)])}
    whole = answer.strip()
    if "\n" not in whole and _short(whole):
        return {"right": _same(golds, answer_text.alternatives(whole))}
    return {"right": _unmarked(golds, answer.replace("<answer>", " "))}


def _of_marked(golds: list[str], said: str, after_mark: bool) -> bool:
    want = answer_text.number_of(golds[0]) if len(golds) == 1 else None
    if after_mark and want is not None and not answer_text.is_formula(said):  # #### 72 clips, from 48
        return answer_text.last_number(said, first=True) == {want}
    return _same(golds, answer_text.alternatives(said))


def _same(golds: list[str], found: list[str]) -> bool:
    equal = [[_equal(gold, one) for one in found] for gold in golds]
    if found and all(map(any, equal)) and all(map(any, zip(*equal, strict=True))):
        return True
    if len(golds) == len(found) or (len(golds) == 1 and answer_text.number_of(golds[0]) is not None):
        return False
    # one of the two may write the set in another way: 5 or 6, {5, 6}
    return bool(found) and bool(verify(_latex(" , ".join(golds)), _latex(" , ".join(found)), **VERIFYING))


def _unmarked(golds: list[str], answer: str) -> bool:
    """Of a response that marks nothing: math-verify looks for the answer in it, in boxes and formulas before others,
    unless it ends with alternatives."""
    found = answer_text.last_alternatives(answer)
    if len(found) > 1:
        return _same(golds, found)
    has_formula = any(sign in answer for sign in ("$", "\\boxed", "\\(", "\\["))
    read = answer_text.for_latex(answer) if has_formula else answer_text.for_prose(answer)
    target = _latex(golds[0] if len(golds) == 1 else " , ".join(golds))
    return bool(verify(target, parse(read, **PARSING), **VERIFYING))


def _equal(gold: str, one: str) -> bool:
    want, number = answer_text.number_of(gold), answer_text.number_of(answer_text.boxed(one) or one)
    if want is not None and number is not None:
        return want == number
    return bool(verify(_latex(gold), _read(one), **VERIFYING))


def _readable(gold: str) -> bool:
    return answer_text.number_of(gold) is not None or bool(_latex(gold))


def _latex(gold: str) -> list[object]:
    """A gold answer as math-verify has it; empty where it is no expression."""
    value = answer_text.number_of(gold)
    if value is not None and "%" not in gold:
        gold = str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    text = answer_text.for_latex(gold)
    return list(parse(text if "$" in text or "\\boxed" in text else f"${text}$", **PARSING))


def _read(said: str) -> list[object]:
    text = answer_text.for_latex(said)
    formula = not any(sign in text for sign in ("$", "\\boxed", "\\[")) and answer_text.is_formula(text)
    return list(parse(f"${text}$" if formula else text, **PARSING))


def _short(text: str) -> bool:
    return len(text) <= 200 and answer_text.is_formula(text) and "\\boxed" not in text


def limit(parent: int) -> None:
    """End with the parent, which may be gone already, and fail to allocate beyond MEMORY."""
    end_with(parent)
    lower(resource.RLIMIT_AS, MEMORY)
    lower(resource.RLIMIT_CORE, 0)


def allow(seconds: float) -> None:
    """CPU time for the next question; SIGXCPU ends the process beyond it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    lower(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + 2 * seconds) + 1)


def main() -> None:
    limit(int(sys.argv[1]))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    replies, sys.stdout = sys.stdout, sys.stderr  # what a parser prints is no reply
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        allow(request["limit_s"])
        print(json.dumps(judge(request["gold"], request["answer"])), file=replies, flush=True)


if __name__ == "__main__":
    main()
