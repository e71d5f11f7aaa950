"""Run by SGLang's own Python: what its sampler keeps and what its parameters accept, as JSON from stdin to stdout.

In:  {"rows": [{"p": [V], "top_k", "top_p", "min_p"}], "params": [sampling_params]}
Out: {"kept": [token ids of each row], "params": [[greedy, max_new_tokens] or null where it is refused]}
"""

from __future__ import annotations

import json
import sys

import torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch as draw
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams


def kept(row: dict) -> list[int]:
    one = torch.tensor([row["top_k"] if row["top_k"] > 0 else TOP_K_ALL])
    *_, weights, ids, _ = draw(
        torch.tensor([row["p"]]),
        one,
        torch.tensor([row["top_p"]]),
        torch.tensor([row["min_p"]]),
        row["min_p"] > 0,
        None,
        torch.zeros(1),
        return_filtered_probs=True,
    )
    return sorted(ids[weights > 0].tolist())


def read(params: dict) -> list | None:
    try:
        s = SamplingParams(**params)
        s.normalize(None)
        s.verify(1000)
    except (TypeError, ValueError):
        return None
    return [s.top_k == 1, s.max_new_tokens]


asked = json.load(sys.stdin)
json.dump({"kept": [kept(r) for r in asked["rows"]], "params": [read(p) for p in asked["params"]]}, sys.stdout)
