"""Messages of a chat as a prompt, by the chat template of the model's tokenizer."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout.chat.template import tool_form
from rollout.chat.tool_forms import ToolForm
from rollout.openai.errors import BadRequest
from rollout.openai.messages import message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Json = dict[str, Any]


class ChatTemplate:
    """The template of a directory's tokenizer, which is loaded by the first chat: transformers' import takes longer
    than the rest of a server's start."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._loaded: PreTrainedTokenizerBase | None = None

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from miles_like.hf.tokenizer import load_tokenizer  # with jinja2

        with self._lock:
            if self._loaded is None:
                self._loaded = load_tokenizer(self._directory)
            return self._loaded

    def _checked(self) -> PreTrainedTokenizerBase:
        """The tokenizer. Raises BadRequest for one without a chat template."""
        tokenizer = self._tokenizer()
        if not tokenizer.chat_template:
            raise BadRequest(
                f"the tokenizer of {self._directory} has no chat template, which turns messages into a prompt: "
                "use /v1/completions, or put the model's chat_template.jinja beside its weights",
                "messages",
            )
        return tokenizer

    def form(self) -> ToolForm:
        """How the model writes tool calls. Raises BadRequest where the template has no place for tools, or teaches a
        form that is not known here."""
        try:
            return tool_form(self._checked(), str(self._directory))
        except BadRequest:
            raise
        except ValueError as e:
            raise BadRequest(f"{e}: send no tools, or describe them in a message", "tools") from None

    def prompt(self, messages: Sequence[Json], tools: Sequence[Json], more: Mapping[str, Any]) -> list[int]:
        """Token ids. more: further variables of the template. Raises BadRequest for messages it rejects."""
        tokenizer = self._checked()
        own = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"}
        if taken := own & more.keys():  # `chat_template` among them, a program
            what = f"chat_template_kwargs.{min(taken)} is not a variable of the template: remove it"
            raise BadRequest(what, "chat_template_kwargs")
        conversation = [message(m, i) for i, m in enumerate(messages)]
        try:
            text = tokenizer.apply_chat_template(
                conversation, tools=list(tools) or None, tokenize=False, add_generation_prompt=True, **more
            )
        except Exception as e:  # a template is a program: it raises what it likes
            why = " ".join(str(e).split())[:300]
            raise BadRequest(f"the model's chat template rejects these messages: {why}", "messages") from None
        return list(tokenizer.encode(str(text), add_special_tokens=False))
