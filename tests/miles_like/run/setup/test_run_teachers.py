"""Teachers as read from the configuration and the files that it names. Nothing is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_like.hf.tokenizer import load_tokenizer
from miles_like.run.setup.teachers import check_same_shapes, privileged
from miles_like.types import Prompt
from tests.support.refusals import refuses

TINY = Path(__file__).parents[4] / "configs" / "tiny"
ASKED = Prompt(id="a", token_ids=(1,), answer="24", text="48/2=", source="gsm8k", meta={"level": "3"})


def shape(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TINY / name).read_text())
    return found


@pytest.mark.slow  # starts the process that renders a chat template
def test_a_privileged_prompt_holds_what_its_template_names() -> None:
    tokenizer = load_tokenizer(TINY)
    ids = privileged("t", "{level}{source}: {answer}, {prompt}", tokenizer, ASKED)
    assert tokenizer.decode(ids) == "3gsm8k: 24, 48/2="
    with refuses(ValueError, "distillation.teachers.t.prompt", "hint", "a"):
        privileged("t", "{prompt}{hint}", tokenizer, ASKED)
    with refuses(ValueError, "answer", "a"):
        privileged("t", "{prompt}{answer}", tokenizer, replace(ASKED, answer=""))


def test_weights_of_another_architecture_are_refused_by_their_first_tensor() -> None:
    check_same_shapes("t", shape("model.json"), shape("model.json"))
    with refuses(ValueError, "model.embed_tokens.weight", "[128, 192]", "[128, 128]", "server"):
        check_same_shapes("t", shape("model_2m.json"), shape("model.json"))
    more = shape("model.json") | {"num_hidden_layers": 4}
    for there, here, facts in (
        (more, shape("model.json"), ("t", "model.layers.3.input_layernorm.weight", "[128]")),
        (shape("model.json"), more, ("t", "model.layers.3.input_layernorm.weight", "[128]")),
    ):
        with refuses(ValueError, *facts):
            check_same_shapes("t", there, here)
