"""Replaced functions are in force inside, as recorded, and stock again outside, after an error too.

Not covered: that a substitute returns what the stock function would: tests/megatron_bridge/fake/test_measured_ranks.py.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from megatron_bridge.fake.substitutes.cuda import cuda_substitutes
from megatron_bridge.fake.substitutes.substitute import Substitute, substituted


class Base:
    def inherited(self) -> str:
        return "stock"


class Child(Base):
    pass


def _fixed(value: Any) -> Any:
    return lambda stock: lambda *args: value


def test_a_function_and_a_method_are_replaced_inside_alone() -> None:
    stock, table = (
        math.floor,
        (
            Substitute("math", "floor", "a test", _fixed(7)),
            Substitute(f"{__name__}:Child", "inherited", "a test", _fixed("other")),
        ),
    )
    with substituted(table) as labels:
        assert math.floor(1.5) == 7 and Child().inherited() == "other" and Base().inherited() == "stock"
        assert labels == ["math.floor: a test", f"{__name__}.Child.inherited: a test"]
    assert math.floor is stock and Child().inherited() == "stock" and "inherited" not in vars(Child)


def test_the_stock_function_returns_after_an_error_and_sees_its_own_replacement() -> None:
    stock = json.dumps
    doubled = Substitute("json", "dumps", "a test", lambda stock: lambda x: stock([x, x]))
    with pytest.raises(KeyError), substituted([doubled]):
        assert json.dumps(1) == "[1, 1]"
        raise KeyError
    assert json.dumps is stock


def test_a_target_that_is_gone_is_an_error_and_undoes_the_others() -> None:
    stock = math.floor
    table = [Substitute("math", "floor", "a test", _fixed(7)), Substitute("math", "no_such", "a test", _fixed(0))]
    with pytest.raises(AttributeError, match="no_such"), substituted(table):
        pass
    assert math.floor is stock


def test_no_function_of_cuda_is_replaced_twice() -> None:
    labels = [(entry.owner, entry.name) for entry in cuda_substitutes()]
    assert len(labels) == len(set(labels))
