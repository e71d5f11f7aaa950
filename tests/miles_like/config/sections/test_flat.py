"""Flat sections: which keys a part has, what the text shows, and what a refused key's message names."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import Field, ValidationError

from miles_like.config.sections.flat import FlatSection, Part, values
from tests.support.refusals import Facts, refuses


class Plain(Part):
    chosen_by = "fill"
    fill: Literal["plain"] = "plain"
    colour: str | None = None


class Dotted(Part):
    chosen_by = "fill"
    fill: Literal["dotted"]
    distance: float


class Circle(Part):
    chosen_by = "kind"
    kind: Literal["circle"] = "circle"
    radius: float = Field(1.0, gt=0)
    fill: Annotated[Plain | Dotted, Field(discriminator="fill")] = Plain()


class Square(Part):
    chosen_by = "kind"
    kind: Literal["square"]
    fill: Annotated[Plain | Dotted, Field(discriminator="fill")] = Plain()


class Own(Part):
    chosen_by = "kind"
    kind: str


class Shadow(Part):
    switch = "shadow"
    shadow: float = Field(gt=0)
    angle: float = 45.0


class Drawing(FlatSection):
    shape: Annotated[Circle | Square, Field(discriminator="kind")] | Own = Circle()
    shadow: Shadow | None = None

    section = "drawing"
    absent: ClassVar[dict[str, object]] = {"shadow": 0.0}


def test_a_text_becomes_parts_and_parts_the_same_text() -> None:
    drawing = Drawing.model_validate({"kind": "square", "fill": "dotted", "distance": 2.0, "shadow": 3})
    assert drawing.shape == Square(kind="square", fill=Dotted(fill="dotted", distance=2.0))
    assert drawing.shadow == Shadow(shadow=3.0)
    text = {"kind": "square", "radius": None, "fill": "dotted", "colour": None, "distance": 2.0}
    assert drawing.model_dump() == values(drawing) == text | {"shadow": 3.0, "angle": 45.0}
    assert list(drawing.model_dump(exclude_none=True)) == ["kind", "fill", "distance", "shadow", "angle"]
    assert Drawing.model_validate(drawing.model_dump()) == drawing


def test_keys_that_are_not_given_have_the_defaults_of_the_part() -> None:
    assert Drawing().model_dump(exclude_none=True) == {"kind": "circle", "radius": 1.0, "fill": "plain", "shadow": 0.0}
    assert Drawing.model_validate({"kind": "m:f", "radius": None, "shadow": 0}).shape == Own(kind="m:f")


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"kind": "square", "radius": 2.0}, ("drawing.radius", 2.0, "drawing.kind", "circle", "square")),
        ({"kind": "m:f", "fill": "plain"}, ("drawing.fill", "plain", "drawing.kind", "circle", "square", "m:f")),
        ({"fill": "dotted", "distance": 1, "colour": "red"}, ("drawing.colour", "red", "drawing.fill", "dotted")),
        ({"angle": 9.0}, ("drawing.angle", 9.0, "drawing.shadow", 0)),
        ({"fill": "dotted"}, ("drawing.fill", "dotted", "drawing.distance")),
        ({"kind": "circel"}, ("drawing.kind", "circel", "circle")),
        ({"radius": -1}, ("radius", -1)),
        ({"radios": 1}, ("radios",)),
    ],
)
def test_a_key_that_the_chosen_part_has_not_is_refused(given: dict[str, Any], facts: Facts) -> None:
    with refuses(ValidationError, *facts):
        Drawing.model_validate(given)
