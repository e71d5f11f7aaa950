"""Whether a chat template only appends: a conversation that goes on begins with the text that it had before.

A turn is sampled after a prompt, and its tokens stay. A template that writes an earlier turn in another way once
messages follow it, such as one that drops reasoning, would be served with tokens that it never writes, and trained on
them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from rollout.chat.positions import same_until

Json = dict[str, Any]
Write = Callable[[Sequence[Json], bool], str]  # messages, whether the next turn begins -> text; raises as it likes

ANSWER = "The dummy answer stands here."
REASONING = "The dummy reasoning stands here."
DUMMY_QUESTION = {"role": "user", "content": "A dummy question."}
_SHOWN = 60  # characters of a text that differs


def dummy_turns(role: str, reasoning: bool) -> Iterator[Json]:
    """Turns that a message of `role` may answer, the likeliest first: a tool answers a call."""
    content = f"<think>\n{REASONING}\n</think>\n\n{ANSWER}" if reasoning else ANSWER
    if role == "tool":
        function = {"name": "dummy_tool", "arguments": {"text": ANSWER}}
        call = {"id": "call_0", "type": "function", "function": function}
        yield {"role": "assistant", "content": content if reasoning else "", "tool_calls": [call]}
    yield {"role": "assistant", "content": content}


def dummy_message(role: str) -> Json:
    more = {"tool_call_id": "call_0", "name": "dummy_tool"} if role == "tool" else {}
    return {"role": role, "content": "A dummy message.", **more}


def added(write: Write, turn: Json, messages: Sequence[Json], stops: Collection[str]) -> str | None:
    """The text after what the model samples of a dummy turn that `messages` follow: from the first of `stops` after it
    on, which the model may have sampled, or from its content on where the template writes no such mark. None where the
    template does not show where the turn ends."""
    text = write([DUMMY_QUESTION, turn, *messages], True)
    after = text.rfind(ANSWER)
    if after < 0:
        return None
    after += len(ANSWER)
    found = sorted(at for at in (text.find(stop, after) for stop in stops) if at >= 0)
    if "tool_calls" in turn:
        return text[found[0] :] if found else None
    return text[next((at for at in found if not text[after:at].strip()), after) :]


def difference(write: Write, role: str, *, reasons: bool) -> str | None:
    """A clause with the first text that a template changes once a message of `role` follows a turn; None: it appends.
    reasons: turns with reasoning are tried too."""
    for reasoning in (False, True) if reasons else (False,):
        for turn in dummy_turns(role, reasoning):
            try:
                problem = _of_turn(write, turn, dummy_message(role))
            except Exception as e:  # a template is a program: it raises what it likes
                why = " ".join(str(e).split())[:200]
                problem = f"it rejects a message of role {role!r} after an assistant's turn ({why})"
            if problem is None:
                break
        if problem is not None:
            return problem
    return None


def _of_turn(write: Write, turn: Json, message: Json) -> str | None:
    """Holds the texts of a conversation to each other, as it grows by the turn and the message."""
    texts = [write([DUMMY_QUESTION, *[turn, message] * n], False) for n in range(3)]
    if ANSWER not in texts[1]:
        return f"it drops {ANSWER!r} of an assistant's turn"
    if REASONING in str(turn["content"]) and REASONING not in texts[1]:
        return f"it drops {REASONING!r}, the reasoning of an assistant's turn, once a {message['role']} message follows"
    for before, after in itertools.pairwise(texts):
        if (same := same_until(before, after)) < len(before):
            old, new = before[same : same + _SHOWN], after[same : same + _SHOWN]
            return f"it writes {new!r} in the place of {old!r} once a {message['role']} message follows"
    return None
