"""Tables of choices: which keys are read, and what a refused key's message names."""

from __future__ import annotations

from typing import Any

import pytest

from miles_like.config.choices import Choice, Choices, keys, part
from miles_like.section import Section


class Drawing(Section):
    kind: str = "none"
    radius: float | None = None
    fill: str | None = None
    colour: str | None = None


class Circle(Section):
    radius: float
    fill: str


CHOICES = Choices(
    "drawing",
    Choice("kind", {"circle": {"radius": 1.0, "fill": "plain"}, "square": {"fill": "plain"}}),
    Choice("fill", {"plain": keys("colour")}),
)


def test_keys_that_are_read_have_their_defaults_and_decide_further_ones() -> None:
    assert CHOICES.read({"kind": "circle"}) == {"radius": 1.0, "fill": "plain", "colour": None}
    assert CHOICES.read({"kind": "square", "fill": "dotted"}) == {"fill": "plain"}
    assert CHOICES.read({"kind": "none", "fill": "plain"}) == {}
    assert part(Drawing(kind="circle", radius=2.0, fill="plain"), Circle) == Circle(radius=2.0, fill="plain")


@pytest.mark.parametrize(
    ("given", "key", "reason", "remedy"),
    [
        ({"kind": "square", "radius": 2.0}, "drawing.radius = 2.0", "drawing.kind = 'square'", "kind = 'circle'"),
        ({"fill": "plain"}, "drawing.fill = 'plain'", "drawing.kind = 'none'", "kind = 'circle' or 'square'"),
        ({"colour": "red"}, "drawing.colour = 'red'", "drawing.kind = 'none'", "kind = 'circle' or 'square'"),
        ({"kind": "square", "fill": "dotted", "colour": "red"}, "colour = 'red'", "fill = 'dotted'", "fill = 'plain'"),
    ],
)
def test_a_key_that_is_not_read_is_refused(given: dict[str, Any], key: str, reason: str, remedy: str) -> None:
    with pytest.raises(ValueError) as refused:
        CHOICES.check(Drawing(**given))
    before, _, after = str(refused.value).partition(" does nothing with ")
    assert before.endswith(key) and reason in after and after.endswith(remedy)


def test_what_is_read_or_not_set_passes() -> None:
    CHOICES.check(Drawing())
    CHOICES.check(Drawing(kind="circle", radius=2.0, fill="plain", colour="red"))
