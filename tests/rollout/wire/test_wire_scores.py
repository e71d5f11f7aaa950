"""Scores of given tokens, and the likeliest at each place, in SGLang's form: read as they were written.

Not covered: a stock server's own replies (tests/sglang_cpu).
"""

from __future__ import annotations

import json
import math

import numpy as np

from rollout.wire.scores import PromptTop, prompt_entries, prompt_scores
from tests.support.refusals import refuses


def test_a_scored_token_that_stock_sglang_names_0_is_the_one_that_was_sent() -> None:
    """It names ids from the vocabulary's last on 0, for they may stand for images; any other id is another prompt's."""
    body = {"meta_info": {"input_token_logprobs": [[None, 5, None], [-1.5, 0, None], [-2.0, 7, None]]}}
    assert prompt_scores(body, np.array([5, 127, 7])).logprobs.tolist() == [-1.5, -2.0]
    with refuses(ValueError, 2, 2):
        prompt_scores(body, np.array([5, 127, 8]))


def test_candidates_of_a_scored_prompt_go_both_ways_in_sglangs_form() -> None:
    """Documented form: null for the first place, then lists of [log-prob, id, text], best first."""
    top = PromptTop(np.array([[3, 7], [2, 9]]), np.array([[-0.25, -2.0], [-0.5, -1.5]], np.float32))
    meta = prompt_entries((-2.0, -4.0), [5, 7, 8], top)
    assert json.loads(json.dumps(meta)) == {
        "input_token_logprobs": [[None, 5, None], [-2.0, 7, None], [-4.0, 8, None]],
        "input_top_logprobs": [None, [[-0.25, 3, None], [-2.0, 7, None]], [[-0.5, 2, None], [-1.5, 9, None]]],
        "output_top_logprobs": [],
    }
    read = prompt_scores({"meta_info": meta}, np.array([1, 5, 7, 8]), start=1, top=2)
    assert read.top is not None and read.logprobs.tolist() == [-2.0, -4.0]
    assert (read.top.ids == top.ids).all() and (read.top.logprobs == top.logprobs).all()
    assert prompt_scores({"meta_info": meta}, np.array([5, 7, 8])).top is None
    with refuses(ValueError, "[2]", 3, 3):
        prompt_scores({"meta_info": meta}, np.array([5, 7, 8]), top=3)
    with refuses(ValueError, "input_top_logprobs"):
        prompt_scores({"meta_info": meta | {"input_top_logprobs": [None]}}, np.array([5, 7, 8]), top=2)
    with refuses(ValueError, "input_top_logprobs"):
        prompt_scores({"meta_info": prompt_entries((-2.0, -4.0), [5, 7, 8], None)}, np.array([5, 7, 8]), top=2)
    meta["input_top_logprobs"][1][0] = (math.nan, 3, None)
    with refuses(ValueError, 2):
        prompt_scores({"meta_info": meta}, np.array([5, 7, 8]), top=2)
