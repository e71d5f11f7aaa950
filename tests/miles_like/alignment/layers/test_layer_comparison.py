"""Streams that are compared part by part: what the inputs of a part explain is not the part's own difference.

Not covered: which bounds healthy models need (tests/laws/test_first_layer_that_differs.py).
"""

from __future__ import annotations

import torch

from miles_like.alignment.layers.compare import compare_states, part_name


def streams() -> torch.Tensor:
    """[S, 2L+1, H] of parts that change a stream by as much as it has."""
    return torch.randn(5, 9, 8, generator=torch.Generator().manual_seed(0)).cumsum(1)


def test_the_same_bits_are_held_to_no_difference() -> None:
    states = torch.randn(5, 9, 8, generator=torch.Generator().manual_seed(0))
    other = states.clone()
    other[3, 4:] += 1e-6
    exact = {"rounding": 0.0, "of_stream": 0.0}
    assert not any(part.differs for part in compare_states(states, states, **exact))
    assert next(part.state for part in compare_states(other, states, **exact) if part.differs) == 4
    nan = states.clone()
    nan[2, 6] = torch.nan
    assert next(part.state for part in compare_states(nan, states, **exact) if part.differs) == 6


def test_a_difference_that_goes_through_all_later_parts_is_of_its_first_part_alone() -> None:
    states = streams()
    other = states.clone()
    other[:, 3:] += 0.5 * torch.randn(5, 1, 8, generator=torch.Generator().manual_seed(1))
    found = compare_states(other, states, rounding=2**-8, of_stream=2**-8)
    assert [part.state for part in found if part.differs] == [3] and found[3].name == "the attention of layer 1"
    assert found[8].stream > 0.05 and found[8].difference < 1e-6


def test_tokens_differ_by_what_they_attend_to() -> None:
    """A difference of token 1's inputs explains one of token 4's change, and none of token 0's."""
    states = streams()
    other = states.clone()
    other[1, 2:] += states[1, 2].norm() * 0.2
    for token, differs in ((4, False), (0, True)):
        changed = other.clone()
        changed[token, 3:] += (states[token, 3] - states[token, 2]) * 0.1
        found = compare_states(changed, states, rounding=2**-8, of_stream=2**-8)
        assert found[3].differs == differs, token


def test_a_token_whose_embedding_is_zero_is_no_difference() -> None:
    """As that of a padding token: it has no relative difference, and the tokens after it keep theirs."""
    states = streams()
    states[1] -= states[1, :1].clone()
    other = states * (1 + 2**-9 * torch.randn(states.shape, generator=torch.Generator().manual_seed(1)))
    bf16 = {"rounding": 2**-8, "of_stream": 2**-8}
    assert not states[1, 0].any() and not any(part.differs for part in compare_states(other, states, **bf16))
    other[3, 5:] += states[3, 5].norm()
    assert next(part.state for part in compare_states(other, states, **bf16) if part.differs) == 5


def test_parts_are_named() -> None:
    assert [part_name(i) for i in (0, 1, 2, 7)] == [
        *("the embedding", "the attention of layer 0", "the MLP of layer 0", "the attention of layer 3")
    ]
