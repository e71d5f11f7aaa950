"""How teachers are told from the configuration and the files that it names. Nothing is started."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miles_like.run_teachers import check_same_shapes, privileged
from miles_like.tokenizer import load_tokenizer
from miles_like.types import Prompt

TINY = Path(__file__).parents[2] / "configs" / "tiny"
ASKED = Prompt(id="a", token_ids=(1,), answer="24", text="48/2=", source="gsm8k", meta={"level": "3"})


def shape(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((TINY / name).read_text())
    return found


def test_a_privileged_prompt_holds_what_its_template_names() -> None:
    tokenizer = load_tokenizer(TINY)
    ids = privileged("t", "{level}{source}: {answer}, {prompt}", tokenizer, ASKED)
    assert tokenizer.decode(ids) == "3gsm8k: 24, 48/2="
    with pytest.raises(ValueError, match=r"teachers.t.prompt has the field 'hint', which prompt 'a' has not .*level"):
        privileged("t", "{prompt}{hint}", tokenizer, ASKED)
    with pytest.raises(ValueError, match=r"has the field 'answer', which prompt 'a' has not"):
        privileged("t", "{prompt}{answer}", tokenizer, replace(ASKED, answer=""))


def test_weights_of_another_architecture_are_refused_by_their_first_tensor() -> None:
    check_same_shapes("t", shape("model.json"), shape("model.json"))
    with pytest.raises(ValueError, match=r"embed_tokens.weight is \[128, 192\] there and \[128, 128\] here.*'server'"):
        check_same_shapes("t", shape("model_2m.json"), shape("model.json"))
    more = shape("model.json") | {"num_hidden_layers": 4}
    for there, here, said in ((more, shape("model.json"), "and absent here"), (shape("model.json"), more, "is absent")):
        with pytest.raises(ValueError, match=said):
            check_same_shapes("t", there, here)
