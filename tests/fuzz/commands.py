"""Commands run in this process, and their end as an Outcome."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from miles_like import cli
from miles_like.command_errors import is_foreseen, sentence
from tests.fuzz.pool import Outcome
from tests.support.cli_runner import CliRunner

FAULT = "internal error of miles-like"


def command(*argv: str) -> Outcome:
    """`miles-like argv`: "accepted" with what it printed, or how it refused."""
    result = CliRunner().invoke(cli.app, list(argv), catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        trace = "".join(traceback.format_exception(result.exception))
        return Outcome(kind="traceback", words=trace)
    if result.exit_code == 0:
        return Outcome(kind="accepted", words=result.stdout)
    return refusal(result.stderr)


def refusal(stderr: str) -> Outcome:
    """What a command wrote to stderr when it ended with a status that is not 0."""
    if "Traceback (most recent call last)" in stderr:
        return Outcome(kind="traceback", words=stderr)
    if FAULT in stderr:
        return Outcome(kind="fault", words=stderr)
    _, found, sentence = stderr.rpartition("error:" if "error:" in stderr else "Error")
    if not found or len(sentence.strip(" \n─│╭╮╰╯")) < 10:
        return Outcome(kind="traceback", words=f"no sentence: {stderr!r}")
    return Outcome(kind="sentence", words=sentence.strip())


def outcome_of(call: Callable[[], object]) -> Outcome:
    """A call of a function that a command makes: its errors are judged as the command judges them."""
    try:
        call()
    except Exception as e:
        if is_foreseen(e):
            return Outcome(kind="sentence", words=sentence(e))
        return Outcome(kind="traceback", words="".join(traceback.format_exception(e)))
    return Outcome(kind="accepted")


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """The worst of several commands on one input."""
    order = ("accepted", "sentence", "fault", "unsound", "traceback")
    return max(outcomes, key=lambda one: order.index(one.kind))
