"""What a chat template has no place for is refused; a chat as a prompt is compared with transformers' in
tests/rollout/embedded/server/test_openai_api.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from rollout.embedded.openai.chat import ChatTemplate
from tests.support.refusals import refuses

pytestmark = pytest.mark.slow  # a tokenizer's template is tried in a process
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
TOOLS = "{% for t in tools or [] %}{{ t.name }}{% endfor %}" + PLAIN
ALTERNATING = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with a user') }}{% endif %}" + PLAIN


def template(path: Path, text: str | None) -> ChatTemplate:
    path.mkdir()
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({} if text is None else {"chat_template": text})
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return ChatTemplate(path)


def test_what_a_template_has_no_place_for_is_refused(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": "b"}]
    with refuses(ValueError, tmp_path / "none", "chat template", "/v1/completions"):
        template(tmp_path / "none", None).prompt(messages, [], {})
    plain = template(tmp_path / "plain", PLAIN)
    assert plain.prompt(messages, [], {}) == [1]
    with refuses(ValueError, tmp_path / "plain", "does not support tools"):
        plain.form()
    with refuses(ValueError, tmp_path / "tools", "hermes", "glm45"):
        template(tmp_path / "tools", TOOLS).form()
    with refuses(ValueError, "begin with a user"):
        template(tmp_path / "alternating", ALTERNATING).prompt(messages, [], {})
    with refuses(ValueError, "messages[0].tool_calls", "'add'", "JSON"):
        call = {"function": {"name": "add", "arguments": "{"}}
        plain.prompt([{"role": "assistant", "tool_calls": [call]}], [], {})
