"""A tool that runs Python in the sandbox of the run."""

from __future__ import annotations

from miles_like.sandbox.make import shared_sandbox
from miles_like.sandbox.program import Program, Ran, SandboxLost, Status
from miles_like.types import EnvironmentLost

MOST_CHARACTERS = 4000  # of an answer; a longer one loses its middle
_ENDED = {
    Status.TIME: "The program was ended at its time limit.",
    Status.MEMORY: "The program was ended at its memory limit.",
    Status.OUTPUT: "The program was ended because it wrote too much.",
}


async def python(code: str) -> str:
    """Run a Python program and return what it prints. Variables do not stay for the next call.

    Args:
        code: the whole program; it must print its results.
    """
    try:
        ran = await shared_sandbox().run(Program(code=code or "\n"))
    except SandboxLost as e:
        raise EnvironmentLost(f"the sandbox was lost: {e}") from e
    return answer_of(ran)


def answer_of(ran: Ran) -> str:
    """What a model is shown of a program: its output, its errors, and how it ended where that was not by itself."""
    parts = [shortened(text.rstrip()) for text in (ran.stdout, ran.stderr) if text.strip()]
    if ran.status is Status.SIGNAL:
        parts.append(f"The program was ended by signal {ran.code}.")
    elif ran.status is not Status.EXIT:
        parts.append(_ENDED[ran.status])
    elif ran.code and not ran.stderr.strip():
        parts.append(f"The program ended with status {ran.code}.")
    return "\n".join(parts) or "(no output)"


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """`text` without its middle where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
