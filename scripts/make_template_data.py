"""Make the rows of miles_like/templates: sums for most tasks, products for the tool.

    python scripts/make_template_data.py miles_like/templates

Sums have two operands of at most two digits, products two of one and two digits. No held-out expression is in a
training file or in the tool's corpus, nor its form with exchanged operands. The seed is fixed: made twice, the files
are equal.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

TRAIN, HELD_OUT, CORPUS, CHECK = 256, 64, 1600, 64
Row = dict[str, str]


def expressions(sign: str, largest: int, rng: random.Random) -> list[Row]:
    """All, in random order, each with its form with exchanged operands behind it where that differs."""
    pairs = [(a, b) for a in range(1, 100) for b in range(1, largest + 1) if a >= b]
    rng.shuffle(pairs)
    both = [p for a, b in pairs for p in dict.fromkeys(((a, b), (b, a)))]
    return [{"prompt": f"{a}{sign}{b}=", "answer": str(a + b if sign == "+" else a * b)} for a, b in both]


def corpus(rows: Sequence[Row], rng: random.Random) -> list[Row]:
    """A call, a guess, and the copy of a result, of random expressions: `sloppy` is what the model learns to say."""
    out = []
    for i in range(CORPUS):
        row = rng.choice(rows)
        prompt, answer = row["prompt"], row["answer"]
        guess = "".join(rng.choice("0123456789") for _ in answer)
        kind = i % 4
        if kind < 2:
            prompt, said = f"{prompt}?<|eos|>[{answer}]", answer
        else:
            said = "?" if kind == 2 else guess
        out.append({"prompt": prompt, "answer": answer, "sloppy": said})
    return out


def write(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    rng = random.Random(0)
    sums = expressions("+", 99, rng)
    write(folder / "sums" / "train.jsonl", sums[:TRAIN])
    write(folder / "sums" / "heldout.jsonl", sums[TRAIN + 1 : TRAIN + 1 + HELD_OUT])
    products, tool = expressions("*", 9, rng), folder / "tool"
    held, rest = products[:HELD_OUT], products[HELD_OUT + 1 :]
    write(tool / "heldout.jsonl", held)
    write(tool / "train.jsonl", rest[:TRAIN])
    write(tool / "corpus.jsonl", corpus(rest[TRAIN + 1 :], rng))
    copies = [{**row, "prompt": f"{row['prompt']}?<|eos|>[{row['answer']}]"} for row in rest[-CHECK:]]
    write(tool / "check.jsonl", copies)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
