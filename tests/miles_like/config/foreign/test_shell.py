"""A launch script is read as bash reads it, without running it.

Why it must hold: a value that is read differently trains another run than the script did. Not covered: branches, loops
and functions, whose lines are all read once.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from miles_like.config.foreign.shell import read_commands
from tests.support.refusals import Facts, refuses

INPUTS = Path(__file__).with_name("inputs")


def by_bash(script: str, program: str) -> list[str]:
    """The words that bash gives to the program."""
    stub = f"""{program}() {{ printf '%s\\0' "$@" >&3; }}\nray() {{ [ "$1" != job ] || {program} "$@"; }}\n"""
    done = subprocess.run(
        ["bash", "-c", f"exec 3>&1 >/dev/null 2>&1\n{stub}{script}"],
        capture_output=True,
        text=True,
        check=True,
        timeout=20,
    )
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("name", ["verl_moe.sh", "slime_moe.sh"])
def test_the_words_of_the_program_are_those_of_bash(name: str) -> None:
    script = (INPUTS / name).read_text()
    (mine,) = [words for words in read_commands(script) if words[0] in ("python3", "ray") and len(words) > 9]
    words = mine[1 : mine.index("2>")] if "2>" in mine else mine[1:]  # the redirection
    assert words == by_bash(script, "python3") and len(mine) > 30


@pytest.mark.parametrize(
    "script",
    [
        "a='x y' b=2; p $a\"$b\" \\$a '$a' \"\\$a\"",
        "A=(1 'two 3' # no\n  4); A+=(5); p ${A[@]} \"${A[@]}\" x",
        "n=7; p $((n * 2 + 1)) $(( (n + 1) / 2 - -3 )) $((n % 4)) ${n}b $n-b ${m:-$n}",
        "p a#b # c\np2() { :; }\n",
        "p --x=1 \\\n  --y \\\n  2",
        "X='--a 1 --b'; p $X 2 \"$X\" ${X}c d$X",
        'p "a\\nb" "c\\\\d" "\\"e" f\\ g',
        "export K=v; p $K\"\"z ''",
    ],
)
def test_quotes_arrays_and_arithmetic_are_those_of_bash(script: str) -> None:
    (mine,) = [words for words in read_commands(script) if words[0] == "p"]
    assert mine[1:] == by_bash(script, "p")


def test_what_only_a_running_shell_knows_stays_as_written() -> None:
    (words,) = read_commands('p $(nproc) ${UNSET_HERE}/x "$OTHER_UNSET" $((UNSET_HERE + 1))')
    assert words == ["p", "$(nproc)", "${UNSET_HERE}/x", "${OTHER_UNSET}", "$((UNSET_HERE + 1))"]


@pytest.mark.parametrize(
    ("script", "facts"),
    [("A=(1 2", ("(",)), ("p 'x", ("'",)), ('p "x', ('"',)), ("p ${x", ("{",)), ("#" * (1 << 21), ("2,097,152",))],
)
def test_what_is_not_closed_is_refused(script: str, facts: Facts) -> None:
    with refuses(ValueError, *facts):
        read_commands(script)
    assert read_commands("p $((9 ** 9 ** 9)) $((1 << 99)) $((1 / 0))")[0][1] == "$((9 ** 9 ** 9))"
