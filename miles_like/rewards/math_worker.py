"""A process that checks mathematical answers, one JSON line in, one JSON line out.

It runs as a program, not as a module, and imports nothing of this project: it starts without torch, and its parent can
kill it, which nothing less can do to an expression like 9**9**9**9 that keeps the interpreter inside one C call.
"""

from __future__ import annotations

import json
import logging
import sys

from math_verify import parse, verify

# The parent keeps the time. math-verify's own limits end in "not equal", which would be a 0 that nobody meant.
PARSING = {"parsing_timeout": None}
VERIFYING = {"timeout_seconds": None}


def judge(gold: str, answer: str) -> dict[str, object]:
    """{"right": bool} or, when the gold answer itself does not parse, {"error": why}."""
    target = parse(gold if "$" in gold or "\\boxed" in gold else f"${gold}$", **PARSING)
    if not target:
        return {"error": f"the reference answer {gold!r} is no mathematical expression"}
    return {"right": bool(verify(target, parse(answer, **PARSING), **VERIFYING))}


def main() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it has no time limit
    replies, sys.stdout = sys.stdout, sys.stderr  # what a parser prints is no reply
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(judge(request["gold"], request["answer"])), file=replies, flush=True)


if __name__ == "__main__":
    main()
