"""A calculator of one operation, for a policy that is asked for two, such as 2*3+40; and the files of the task.

    python docs/examples/calculator/calculator.py            # writes corpus.jsonl and check.jsonl beside this file
    python docs/examples/calculator/calculator.py GSM8K_DIR  # and train.jsonl and heldout.jsonl, which are there
    miles-like train docs/examples/calculator/calculator.toml

The policy's turn `<calc>2*3</calc>` is answered by `6;`, any other turn is its answer. Prompts are annotations of
GSM8K's solutions (MIT, configs/tiny/LICENSE), those of its test file held out. The corpus of the warm-up has other
expressions: a tenth of its first turns call the calculator, the others answer at once.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from miles_like.protocols import MakeEnvironment, SampleReward
from miles_like.types import Observation, Prompt, Sample

HERE = Path(__file__).parent
ANNOTATION = re.compile(r"<<([^<>=]*)=[^<>=]*>>")
EXPRESSION = re.compile(r"(\d{1,2})([-+*/])(\d{1,2})([-+*/])(\d{1,2})")
LARGEST = 999
CALLS = 0.1  # share of the corpus' first turns
CORPUS, CHECK = 8_000, 200  # expressions
Step = tuple[str, int]  # an operation, and its value
CALL = re.compile(r"<calc>(\d{1,3})([-+*/])(\d{1,3})</calc>")


def value_of(left: int, operation: str, right: int) -> int | None:
    """None where it is no integer."""
    if operation == "/":
        return left // right if right and left % right == 0 else None
    return {"+": left + right, "-": left - right, "*": left * right}[operation]


class Calculator:
    """Protocol: MakeEnvironment; its instances are Environments."""

    def __init__(self, prompt: Prompt, *, seed: int) -> None:
        self.random = random.Random(seed)

    def __call__(self, sample: Sample, turn: str) -> Observation:
        asked = CALL.fullmatch(turn)
        if asked is None:
            return Observation(ends=True)  # the reward scores what the policy has written
        return self.reply(value_of(int(asked[1]), asked[2], int(asked[3])))

    def reply(self, value: int | None) -> Observation:
        return Observation(text="no;" if value is None else f"{value};")


class Broken(Calculator):
    """A control: the calculator answers a number drawn at random."""

    def reply(self, value: int | None) -> Observation:
        return Observation(text=f"{self.random.randint(0, 99)};")


class Forbidden(Calculator):
    """A control: a call ends the episode and is worth nothing."""

    def reply(self, value: int | None) -> Observation:
        return Observation(ends=True, reward=0.0)


def last_answer(prompt: Prompt, sample: Sample) -> dict[str, float]:
    """Protocol: SampleReward. What the policy has written after the last reply; the calls are a part of it, logged."""
    answer = sample.text.rpartition(";")[2]
    return {"score": float(answer == prompt.answer), "calls": float(sample.text.count("</calc>"))}


_: tuple[MakeEnvironment, MakeEnvironment, MakeEnvironment, SampleReward] = Calculator, Broken, Forbidden, last_answer


# ---- the files of the task


def steps(expression: str) -> tuple[Step, Step] | None:
    """The operation that comes first and the other one; None where a value is no integer from 0 to 999."""
    found = EXPRESSION.fullmatch(expression)
    if found is None:
        return None
    a, o, b, p, c = found.groups()
    right_first = p in "*/" and o in "+-"
    first = (b, p, c) if right_first else (a, o, b)
    middle = value_of(int(first[0]), first[1], int(first[2]))
    if middle is None:
        return None
    second = (a, o, str(middle)) if right_first else (str(middle), p, c)
    last = value_of(int(second[0]), second[1], int(second[2]))
    if last is None or not (0 <= middle <= LARGEST and 0 <= last <= LARGEST):
        return None
    return ("".join(first), middle), ("".join(second), last)


def problem(expression: str) -> dict[str, str]:
    found = steps(expression)
    assert found is not None
    return {"prompt": f"{expression}=", "answer": str(found[1][1])}


def expressions_of(path: Path) -> list[str]:
    """The expressions of a file of GSM8K, each once."""
    texts = (json.loads(line)["answer"] for line in path.read_text(encoding="utf-8").splitlines())
    found = {match[1].replace(" ", "") for text in texts for match in ANNOTATION.finditer(text)}
    return sorted(expression for expression in found if steps(expression))


def other_expressions(known: set[str], rng: random.Random) -> Iterator[tuple[str, tuple[Step, Step]]]:
    while True:
        largest = rng.choice((20, 99))
        parts = [str(rng.randint(1, largest)) if i % 2 == 0 else rng.choice("++--**/") for i in range(5)]
        expression = "".join(parts)
        if expression not in known and (found := steps(expression)):
            yield expression, found


def turns(expression: str, found: tuple[Step, Step], *, calls: bool) -> list[dict[str, str]]:
    """What the policy writes in each turn: a turn ends with the end token, the calculator's reply with ";"."""
    (first, middle), (second, last) = found
    begin = f"{expression}="
    then = f"{begin}<calc>{first}</calc><|eos|>{middle};"
    return [
        {"prompt": begin, "answer": f"<calc>{first}</calc>" if calls else str(last)},
        {"prompt": then, "answer": f"<calc>{second}</calc>"},
        {"prompt": f"{then}<calc>{second}</calc><|eos|>{last};", "answer": str(last)},
    ]


def write(name: str, rows: Iterable[Mapping[str, str]]) -> None:
    (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    if len(sys.argv) > 1:
        train, test = (expressions_of(Path(sys.argv[1]) / f"{part}.jsonl") for part in ("train", "test"))
        random.Random(0).shuffle(train)
        write("train", map(problem, train))
        write("heldout", (problem(expression) for expression in test if expression not in set(train)))
    files = [HERE / "train.jsonl", HERE / "heldout.jsonl"]
    known = {json.loads(line)["prompt"][:-1] for path in files for line in path.read_text().splitlines()}
    others, rng = other_expressions(known, random.Random(1)), random.Random(2)
    corpus = [turns(*next(others), calls=rng.random() < CALLS) for _ in range(CORPUS)]
    write("corpus", (row for rows in corpus for row in rows))
    write("check", (turns(*next(others), calls=True)[1] for _ in range(CHECK)))


if __name__ == "__main__":
    main()
