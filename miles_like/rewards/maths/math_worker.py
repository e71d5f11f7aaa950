"""Worker process that compares mathematical answers: one JSON line in, one JSON line out.

`python -P math_worker.py PARENT_PID`. It runs as a script, not as a module, and starts without torch. It is a process
because only killing it stops an expression like 9**9**9**9, which keeps the interpreter inside one C call. It is killed
when its parent ends (PR_SET_PDEATHSIG) and is limited to 2 GiB of address space and, for each request, to twice the
parent's time limit in CPU seconds.
"""

from __future__ import annotations

import json
import logging
import math
import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # the directory that holds miles_like

from math_verify import parse, verify

from miles_like.limits.child_process import die_with_parent, set_soft_limit
from miles_like.rewards.maths import answer_text

# The parent enforces the time limit. math-verify's own limits would return "not equal", which would score 0.
PARSING = {"parsing_timeout": None}
VERIFYING = {"timeout_seconds": None}
MEMORY = 2 << 30  # bytes of address space; with all imports 0.2 GiB are used


def compare(gold: str, answer: str) -> dict[str, object]:
    """{"right": bool} or, when the gold answer itself does not parse, {"error": why}.

    Alternatives ("5 or 6") are compared as sets: each of the response must equal one of the gold answer, and vice
    versa. Numbers are compared exactly, other expressions by math-verify.
    """
    golds = answer_text.alternatives(gold)
    if not golds or not all(_readable(one) for one in golds):
        return {"error": f"the reference answer {gold[:200]!r} is not a mathematical expression"}
    marked = answer_text.given(answer)
    if marked is not None:
        return {"right": _marked_is_right(golds, *marked)}
    if (boxed := answer_text.boxed(answer)) is not None:
        return {"right": _same(golds, [f"\\boxed{{{part}}}" for part in answer_text.alternatives(boxed)])}
    whole = answer.strip()
    if "\n" not in whole and _short(whole):
        return {"right": _same(golds, answer_text.alternatives(whole))}
    return {"right": _unmarked_is_right(golds, answer.replace("<answer>", " "))}


def _marked_is_right(golds: list[str], text: str, after_mark: bool) -> bool:
    want = answer_text.number_of(golds[0]) if len(golds) == 1 else None
    if after_mark and want is not None and not answer_text.is_formula(text):  # #### 72 clips, from 48
        return answer_text.last_number(text, first=True) == {want}
    return _same(golds, answer_text.alternatives(text))


def _same(golds: list[str], found: list[str]) -> bool:
    equal = [[_equal(gold, one) for one in found] for gold in golds]
    if found and all(map(any, equal)) and all(map(any, zip(*equal, strict=True))):
        return True
    if len(golds) == len(found) or (len(golds) == 1 and answer_text.number_of(golds[0]) is not None):
        return False
    # the two sides may write the same set in different ways: 5 or 6, {5, 6}
    return bool(found) and bool(verify(_latex(" , ".join(golds)), _latex(" , ".join(found)), **VERIFYING))


def _unmarked_is_right(golds: list[str], answer: str) -> bool:
    """For a response without a marked answer: compares the alternatives that it ends with, or else lets math-verify
    find the answer, first in boxes and formulas."""
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
    """A gold answer as math-verify parses it; empty where it does not parse."""
    value = answer_text.number_of(gold)
    if value is not None and "%" not in gold:
        gold = str(value) if value.denominator == 1 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    text = answer_text.for_latex(gold)
    return list(parse(text if "$" in text or "\\boxed" in text else f"${text}$", **PARSING))


def _read(answer: str) -> list[object]:
    text = answer_text.for_latex(answer)
    formula = not any(sign in text for sign in ("$", "\\boxed", "\\[")) and answer_text.is_formula(text)
    return list(parse(f"${text}$" if formula else text, **PARSING))


def _short(text: str) -> bool:
    return len(text) <= 200 and answer_text.is_formula(text) and "\\boxed" not in text


def limit(parent: int) -> None:
    """Be killed when the parent ends, and limit memory to MEMORY."""
    die_with_parent(parent)
    set_soft_limit(resource.RLIMIT_AS, MEMORY)
    set_soft_limit(resource.RLIMIT_CORE, 0)


def allow(seconds: float) -> None:
    """Limit the CPU time of the next request; SIGXCPU then ends the process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    set_soft_limit(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + 2 * seconds) + 1)


def main() -> None:
    limit(int(sys.argv[1]))
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    replies, sys.stdout = sys.stdout, sys.stderr  # text that a parser prints must not be read as a reply
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        allow(request["limit_s"])
        print(json.dumps(compare(request["gold"], request["answer"])), file=replies, flush=True)


if __name__ == "__main__":
    main()
