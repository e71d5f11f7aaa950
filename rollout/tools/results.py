"""What came of a tool call."""

from __future__ import annotations

from dataclasses import dataclass

UNKNOWN_TOOL = "unknown_tool"
WRONG_ARGUMENTS = "wrong_arguments"
FAILED = "failed"  # the tool raised, or its server answered with an error
TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Result:
    """What the model reads, and a `Span.status`."""

    text: str
    status: str


class WrongArguments(Exception):
    """Arguments that the tool does not take; the message names them."""


class ToolError(Exception):
    """A tool failed; the message is for the model."""
