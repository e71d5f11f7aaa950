"""Replies of /v1/completions and /v1/chat/completions, whole and as chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from rollout.chat.tool_forms import Json, ToolCall, ToolForm
from rollout.embedded.openai.detokenize import Vocabulary
from rollout.embedded.openai.sample_text import Piece, TextToken
from rollout.openai.frames import called, frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """Those to one request. form: of the calls of `tools`; None: none were sent."""

    chat: bool
    model: str
    vocabulary: Vocabulary
    logprobs: bool = False
    tools: Sequence[Json] = ()
    form: ToolForm | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, samples: Sequence[Sequence[Piece]], usage: Json) -> Json:
        """samples: the pieces of each."""
        choices = [self._choice(i, _joined(pieces)) for i, pieces in enumerate(samples)]
        return self._frame("chat.completion" if self.chat else "text_completion", choices) | {"usage": usage}

    def begin(self, choice: int) -> Json:
        """The first chunk of a choice of a chat."""
        return self._chunk({"index": choice, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def chunk(self, choice: int, piece: Piece) -> Json | None:
        """None: nothing to send."""
        text, calls, finish = self._content(piece)
        if not (text or calls or piece.tokens or finish):
            return None
        out: Json = {"index": choice, "logprobs": self._logprobs(piece.tokens), "finish_reason": finish}
        if not self.chat:
            return self._chunk(out | {"text": text})
        delta: Json = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = [{"index": i} | call for i, call in enumerate(calls)]
        return self._chunk(out | {"delta": delta})

    def usage_chunk(self, usage: Json) -> Json:
        return self._frame("chat.completion.chunk" if self.chat else "text_completion", []) | {"usage": usage}

    def _chunk(self, choice: Json) -> Json:
        return self._frame("chat.completion.chunk" if self.chat else "text_completion", [choice])

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return frame(kind, choices, model=self.model, number=self.id, created=self.created)

    def _choice(self, i: int, piece: Piece) -> Json:
        text, calls, finish = self._content(piece)
        out: Json = {"index": i, "logprobs": self._logprobs(piece.tokens), "finish_reason": finish}
        if not self.chat:
            return out | {"text": text}
        message: Json = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = calls
        return out | {"message": message}

    def _content(self, piece: Piece) -> tuple[str, list[Json], str | None]:
        """Text, tool calls and finish_reason. Calls that cannot be read are text."""
        calls: list[ToolCall] = []
        if piece.calls and self.form is not None:
            calls = self.form.parse(piece.calls, self.tools)
        if not calls:
            return piece.text + piece.calls, [], piece.finish
        found = [called(c.name, c.arguments) for c in calls]
        return piece.text, found, "tool_calls" if piece.finish == "stop" else piece.finish

    def _logprobs(self, tokens: Sequence[TextToken]) -> Json | None:
        if not self.logprobs:
            return None
        if self.chat:
            return {"content": [self._chat_token(t) for t in tokens]}
        return {
            "tokens": [self._name(t.sampled.id) for t in tokens],
            "token_logprobs": [t.sampled.logprob for t in tokens],
            "top_logprobs": [{self._name(i): p for i, p in t.sampled.top} for t in tokens],
            "text_offset": [t.start for t in tokens],
        }

    def _chat_token(self, token: TextToken) -> Json:
        s = token.sampled
        return self._entry(s.id, s.logprob) | {"top_logprobs": [self._entry(i, p) for i, p in s.top]}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self.vocabulary.bytes_of(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}

    def _name(self, token: int) -> str:
        """Text of a token; of a part of a character its bytes, as OpenAI writes them."""
        data = self.vocabulary.bytes_of(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def _joined(pieces: Sequence[Piece]) -> Piece:
    """As one."""
    last = pieces[-1]
    tokens = [t for p in pieces for t in p.tokens]
    return Piece("".join(p.text for p in pieces), tokens, last.calls, last.finish)
