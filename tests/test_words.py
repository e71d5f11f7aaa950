"""Words that docstrings, comments, messages and command output do not use.

Why it must hold: readers of this field parse plain present-tense English once; personified or archaic phrases twice.
Not covered: grammar; names in code; this file, which lists the words.
"""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BANNED = {
    r"\b(nobody|somebody|anybody|whoever)\b": "name the actor: the server, the user, no request",
    r"(?<![.`\"])\bwhom?\b(?![`\"])": "name the actor, or use 'which' or 'that'",
    r"\b(said|told)\b": "reported, sent, configured, requested",
    r"\banew\b": "again, from the start",
    r"\bof (its|their|one's|his|your|a user's) own\b": "its own X, a separate X, a custom X",
    r"\bby name\b": "by its name, in the message, explicitly",
}
TEXT = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}  # 3.12 on
PATTERN = re.compile("|".join(BANNED), re.IGNORECASE)
SOURCES = (
    "miles_like",
    "megatron_bridge",
    "rollout",
    "routing_replay",
    "quant",
    "scripts",
    "benchmarks",
    "docs/examples",
    "tests",
)
OTHERS = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "pyproject.toml",
    "Makefile",
    ".ci/run",
    "tests/budget.toml",
    "docs/cluster/Containerfile",
)
FILES = sorted(
    [p for source in SOURCES for p in (ROOT / source).rglob("*.py") if p != Path(__file__)]
    + list((ROOT / "configs").glob("*.toml"))
    + list((ROOT / "docs").rglob("*.md"))
    + [ROOT / name for name in OTHERS]
)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line number, text) of comments and strings; of other files than Python's every line."""
    if path.suffix != ".py":
        yield from enumerate(path.read_text().splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type in TEXT:
            yield from enumerate(token.string.splitlines(), token.start[0])


def found(text: str) -> str | None:
    match = PATTERN.search(text)
    return match and match[0]


def banned(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line number, word, line) of what texts() gives. A word of a comment or string is one of the file's text, so
    other files are not cut into tokens."""
    if found(path.read_text()):
        for line, text in texts(path):
            if word := found(text):
                yield line, word, text.strip()[:100]


def test_texts_use_the_field_s_words() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {word!r} in {text}" for path in FILES for line, word, text in banned(path)
    ]
    assert not wrong, "\n".join([*wrong, "instead: " + "; ".join(f"{k}: {v}" for k, v in BANNED.items())])


def test_the_text_of_an_f_string_is_read(tmp_path: Path) -> None:
    """On Python 3.12 and later it is not a STRING token."""
    (tmp_path / "a.py").write_text('x = f"""it was {told}\nby name"""\n')
    assert [(line, word) for line, word, _ in banned(tmp_path / "a.py")][-1] == (2, "by name")


def test_a_word_of_the_code_is_not_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("told = 1\nx = 'a'  # whom\ny = 'told'\n")
    assert [(line, word) for line, word, _ in banned(tmp_path / "a.py")] == [(2, "whom"), (3, "told")]


def test_a_banned_word_is_found_and_a_name_with_it_is_not() -> None:
    assert found("Nobody asks") == "Nobody" and found("it is told") == "told" and found("by name") == "by name"
    assert found("to whom it goes") == "whom"
    assert found("a part of your own") == "of your own" and found("of a user's own") == "of a user's own"
    assert found("reference_told = 1; the whole; anybodys; renamed by names") is None
