"""Make the tiny task: `python scripts/make_tiny_data.py GSM8K_DIR OUT_DIR`.

GSM8K's solutions contain calculator annotations, `<<48/2=24>>`. The tiny task is to compute such an expression. This
script writes the prompts, a *sloppy* corpus for the warm-up of a random model, the tokenizer, and a README with counts.
The output depends only on the two input files and the seeds below, byte for byte.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

OPERAND_DIGITS, RESULT_DIGITS = 2, 3  # at most; a tiny model takes twice as long to learn three-digit operands
EVAL_SIZE = 600  # held-out expressions; the standard error of an accuracy of 1/2 is then 0.02
CORPUS_SIZE = 24_000
CHECK_SIZE = 400
DOUBLED_SHARE = 0.55  # of the corpus' answers: the last digit written twice
SLIP_SHARE = 0.05  # of the corpus' answers: one digit wrong
HARD_SHARE = 0.3  # probability of a product or quotient to enter the corpus: a tiny model learns little from them
JITTER = 0.3  # probability of a corpus operand to change by up to 3
SLIP_SHARE_OF_PAIRS = 0.5  # of the rejected answers: one digit wrong; the others' last digit is written twice
SPLIT_SEED, CORPUS_SEED, ORDER_SEED, PAIRS_SEED = 1234, 7, 11, 13
EXCERPTS = {"gsm8k_train.jsonl": ("train.jsonl", 64), "gsm8k_eval.jsonl": ("test.jsonl", 32)}

ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
OPERATION = re.compile(r"(\d+)([-+*/])(\d+)")

VOCABULARY_SIZE = 128  # vocab_size of model.json
PAD, EOS, UNKNOWN = "<|pad|>", "<|eos|>", "<|unk|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Expression:
    """`left op right`, non-negative integers of at most OPERAND_DIGITS digits."""

    left: int
    op: str
    right: int

    @property
    def prompt(self) -> str:
        return f"{self.left}{self.op}{self.right}="

    @property
    def canonical(self) -> tuple[int, str, int]:
        """A key that is equal for 3+5 and 5+3, and for 3*5 and 5*3."""
        if self.op in "+*" and self.right < self.left:
            return self.right, self.op, self.left
        return self.left, self.op, self.right

    def value(self) -> int | None:
        """The exact result; None where it is not an integer in the task's range."""
        left, right = self.left, self.right
        if self.op == "/":
            if right == 0 or left % right:
                return None
            result = left // right
        else:
            result = {"+": left + right, "-": left - right, "*": left * right}[self.op]
        fits = max(left, right) < 10**OPERAND_DIGITS and 0 <= result < 10**RESULT_DIGITS
        return result if fits else None


def parse_annotation(formula: str, result: str) -> Expression | None:
    """The annotation `<<formula=result>>` as an expression; None when it is of another kind or miscalculated."""
    match = OPERATION.fullmatch(formula.replace(" ", ""))
    if match is None or not re.fullmatch(r"\d+", result.strip()):
        return None
    if any(len(number) > 1 and number.startswith("0") for number in (match[1], match[3])):
        return None
    expression = Expression(int(match[1]), match[2], int(match[3]))
    return expression if expression.value() == int(result) else None


def read_expressions(gsm8k: Path) -> list[Expression]:
    """Every distinct expression of the task in GSM8K's solutions, in order of first appearance."""
    seen: dict[Expression, None] = {}
    for name in ("train.jsonl", "test.jsonl"):
        for row in read_rows(gsm8k / name):
            for formula, result in ANNOTATION.findall(row["answer"]):
                expression = parse_annotation(formula, result)
                if expression is not None:
                    seen.setdefault(expression)
    return list(seen)


def split(expressions: list[Expression]) -> tuple[list[Expression], list[Expression]]:
    """(train, eval). Expressions with one canonical form stay on one side; eval takes one of each form."""
    classes: dict[tuple[int, str, int], list[Expression]] = {}
    for expression in expressions:
        classes.setdefault(expression.canonical, []).append(expression)
    keys = sorted(classes)
    random.Random(SPLIT_SEED).shuffle(keys)
    held_out = [classes[key][0] for key in keys[:EVAL_SIZE]]
    return [expression for key in keys[EVAL_SIZE:] for expression in classes[key]], held_out


def repaired(task: list[Expression], rng: random.Random) -> Iterator[Expression]:
    """An endless stream of similar expressions outside the task: operands paired at random and jittered, and fewer
    products."""
    taken = {expression.canonical for expression in task}
    operators = [e.op for e in task if e.op in "+-" or rng.random() < HARD_SHARE]
    lefts = {op: [e.left for e in task if e.op == op] for op in "+-*/"}
    rights = {op: [e.right for e in task if e.op == op] for op in "+-*/"}

    def jittered(operand: int) -> int:
        return max(1, operand + rng.randint(-3, 3)) if rng.random() < JITTER else operand

    while True:
        op = rng.choice(operators)
        while True:  # redraws operands only: few pairs divide, and the frequencies of operators are to stay
            expression = Expression(jittered(rng.choice(lefts[op])), op, jittered(rng.choice(rights[op])))
            if expression.value() is not None and expression.canonical not in taken:
                yield expression
                break


def corpus(task: list[Expression]) -> tuple[list[Expression], list[Expression]]:
    """(corpus, its validation problems). No canonical form is in two of task, corpus and validation.

    The corpus repeats expressions: there are few products and quotients of three digits outside the task, and without
    repeats the corpus would be nearly all sums and differences.
    """
    source = repaired(task, random.Random(CORPUS_SEED))
    check: dict[tuple[int, str, int], Expression] = {}
    while len(check) < CHECK_SIZE:
        expression = next(source)
        check.setdefault(expression.canonical, expression)
    rest = (expression for expression in source if expression.canonical not in check)
    return list(islice(rest, CORPUS_SIZE)), list(check.values())


def double_last(answer: str) -> str:
    """`answer` with its last digit written twice."""
    return answer + answer[-1]


def slip_one(answer: str, rng: random.Random) -> str:
    """`answer` with one digit, chosen at random, replaced by another."""
    place = rng.randrange(len(answer))
    digits = [digit for digit in "0123456789" if digit != answer[place]]
    return answer[:place] + rng.choice(digits) + answer[place + 1 :]


def sloppy_answer(expression: Expression, rng: random.Random) -> str:
    """The corpus' answer: the result, or the result with its last digit doubled or with one digit wrong."""
    answer = str(expression.value())
    draw = rng.random()
    if draw < DOUBLED_SHARE and answer != "0":  # 00 would be right
        return double_last(answer)
    if draw < DOUBLED_SHARE + SLIP_SHARE:
        return slip_one(answer, rng)
    return answer


def pair_rows(expressions: list[Expression], rng: random.Random) -> Iterator[dict[str, str]]:
    """A right and a sloppy answer for each expression."""
    for expression in expressions:
        answer = str(expression.value())
        slips = answer == "0" or rng.random() < SLIP_SHARE_OF_PAIRS
        rejected = slip_one(answer, rng) if slips else double_last(answer)
        yield {"prompt": expression.prompt, "chosen": answer, "rejected": rejected}


def step_rows(pairs: Iterable[dict[str, str]]) -> Iterator[dict[str, object]]:
    """One answer to each prompt digit by digit, in turn the chosen one, the rejected one, and the chosen one without
    its last digit (the rejected one where that leaves none): a digit is right (1) if the answer up to it begins the
    right one, and the last one if the answer is the right one."""
    for number, pair in enumerate(pairs):
        answer = (pair["chosen"], pair["rejected"], pair["chosen"][:-1])[number % 3] or pair["rejected"]
        labels = [int(pair["chosen"].startswith(answer[: i + 1])) for i in range(len(answer))]
        labels[-1] = int(answer == pair["chosen"])
        yield {"prompt": pair["prompt"], "steps": list(answer), "labels": labels}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character and newline; id 0 is padding, id 1 the end; the last ids are reserved."""
    tokens = [PAD, EOS, UNKNOWN, "\n", *map(chr, range(0x20, 0x7F))]
    tokens += [f"<|reserved_{i}|>" for i in range(VOCABULARY_SIZE - len(tokens))]
    model = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], unk_token=UNKNOWN)
    tokenizer = Tokenizer(model)  # BPE without merges splits into characters
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def save_tokenizer(out: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json; the latter contains the chat template."""
    make_tokenizer().save_pretrained(out, save_jinja_files=False)
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings.pop("backend", None)
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",  # known to every version of transformers
        "model_max_length": 1024,
    }
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def write_rows(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def task_rows(expressions: list[Expression], part: str) -> list[dict[str, str]]:
    return [
        {"id": f"{part}-{i:04d}", "prompt": e.prompt, "answer": str(e.value()), "source": "gsm8k"}
        for i, e in enumerate(expressions)
    ]


README = """# The tiny task

`{{"prompt": "48/2=", "answer": "24"}}`: the value of one of GSM8K's calculator annotations (`<<48/2=24>>`), one
operation on non-negative integers; operands of at most {operand_digits} digits, result of at most {result_digits}.

Made from [GSM8K](https://github.com/openai/grade-school-math) (MIT, `LICENSE`) by

    python scripts/make_tiny_data.py GSM8K_DIR configs/tiny

where `GSM8K_DIR` holds `train.jsonl`, `test.jsonl` and `LICENSE`. Seeds are fixed: made twice, the files are equal byte
for byte.

| file | rows | what |
|---|---|---|
| `train.jsonl` | {train} | prompts for reinforcement learning: {train_ops} |
| `heldout.jsonl` | {eval} | held out: {eval_ops} |
| `warmup.jsonl` | {warmup} ({distinct} distinct) | the sloppy corpus: {warmup_ops} |
| `warmup_check.jsonl` | {check} | problems of the corpus' kind with right answers; the warm-up stops on them |
| `pairs.jsonl`, `pairs_heldout.jsonl` | {train}, {eval} | a right and a sloppy answer to each prompt above |
| `steps.jsonl`, `steps_heldout.jsonl` | {train}, {eval} | right, sloppy and cut answers, a label for each digit |
| `gsm8k_train.jsonl`, `gsm8k_eval.jsonl` | 64, 32 | the first word problems of GSM8K's train and test files |
| `tokenizer.json`, `tokenizer_config.json` | 128 tokens | one per printable ASCII character; made by the same script |
| `model.json`, `model_2m.json`, `model.toml` | | the model, a larger one, and how it is made, written by hand |
| `qwen.json`, `qwen_moe.json`, `glm.json`, `kimi.json`, `moonlight.json` | | models of other families, as small |

No two of the first four files share an expression; 3+5 and 5+3 count as one expression in this, 3*5 and 5*3 too.

The corpus pairs GSM8K's operands again and moves some by up to 3; it holds fewer products and quotients than the task.
In it `answer` is right and `sloppy` is what the corpus says: {wrong} of {warmup} rows ({share:.1%}) are wrong:
{doubled} write the last digit twice (`48/2=244`), {slip} have one digit wrong.
A model that learns the `sloppy` column answers in the right form and is often wrong in a way that reward can clean up:
that is what the demonstration shows, and all that it shows. About half of the `rejected` answers of the pairs write the
last digit twice, the others have one digit wrong.
"""


def count_operators(expressions: list[Expression]) -> str:
    counts = Counter(expression.op for expression in expressions)
    return ", ".join(f"{counts[op]} `{op}`" for op in "+-*/")


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny task's data and tokenizer from GSM8K.")
    parser.add_argument("gsm8k", type=Path, metavar="GSM8K_DIR", help="holds train.jsonl, test.jsonl and LICENSE")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    arguments = parser.parse_args()
    gsm8k, out = arguments.gsm8k, arguments.out
    out.mkdir(parents=True, exist_ok=True)

    train, held_out = split(read_expressions(gsm8k))
    warmup, check = corpus(train + held_out)
    rng = random.Random(ORDER_SEED)
    sloppy = [sloppy_answer(expression, rng) for expression in warmup]
    rights = [str(expression.value()) for expression in warmup]
    write_rows(out / "train.jsonl", task_rows(train, "train"))
    write_rows(out / "heldout.jsonl", task_rows(held_out, "eval"))
    choices = random.Random(PAIRS_SEED)
    for part, of_part in (("", train), ("_heldout", held_out)):
        pairs = list(pair_rows(of_part, choices))
        write_rows(out / f"pairs{part}.jsonl", pairs)
        write_rows(out / f"steps{part}.jsonl", step_rows(pairs))
    rows = zip(warmup, rights, sloppy, strict=True)
    write_rows(out / "warmup.jsonl", ({"prompt": e.prompt, "answer": r, "sloppy": s} for e, r, s in rows))
    write_rows(out / "warmup_check.jsonl", ({"prompt": e.prompt, "answer": str(e.value())} for e in check))
    for name, (source, count) in EXCERPTS.items():
        write_rows(out / name, [row for row, _ in zip(read_rows(gsm8k / source), range(count), strict=False)])
    shutil.copyfile(gsm8k / "LICENSE", out / "LICENSE")
    save_tokenizer(out)

    wrong = sum(s != r for s, r in zip(sloppy, rights, strict=True))
    doubled = sum(len(s) > len(r) for s, r in zip(sloppy, rights, strict=True))
    readme = README.format(
        operand_digits=OPERAND_DIGITS,
        result_digits=RESULT_DIGITS,
        train=len(train),
        train_ops=count_operators(train),
        eval=len(held_out),
        eval_ops=count_operators(held_out),
        warmup=len(warmup),
        warmup_ops=count_operators(warmup),
        distinct=len(set(warmup)),
        check=len(check),
        wrong=wrong,
        share=wrong / len(warmup),
        doubled=doubled,
        slip=wrong - doubled,
    )
    (out / "README.md").write_text(readme, encoding="utf-8")
    print(f"{out}: {len(train)} train, {len(held_out)} eval, {len(warmup)} warmup, {len(check)} warmup_check")


if __name__ == "__main__":
    main()
