"""Law: the embedded engine keeps the tokens that SGLang's sampler keeps, and reads `sampling_params` as SGLang does.

The oracle is SGLang 0.5.23's own function and class, called in its virtual environment. Not covered: FlashInfer's
kernel, which needs a GPU; the draws themselves, whose random numbers are not SGLang's.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from typing import Any

import numpy as np
import pytest
import torch

from rollout.embedded.engine.sampler import kept
from rollout.wire.generate import GenerateRequest
from tests.sglang_cpu.serve import ENVIRONMENT
from tests.sglang_cpu.served import PROGRAMS, PYTHON

HALVES = [0.25, 0.0625, 0.5, 0.0625, 0.125]  # sums of halves: no rounding decides

READ: list[dict[str, Any]] = [  # both accept or both refuse
    *({"temperature": t} for t in (0.0, 9e-7, 1e-6, 2.5, None, -0.1, float("nan"), float("inf"))),
    *({"top_k": k} for k in (1, 7, -1, None, 0, -2)),
    *({"top_p": p} for p in (1.0, 0.3, None, 0.0, 1.01, -0.5, float("nan"))),
    *({"min_p": p} for p in (0.0, 0.3, 1.0, None, 1.01, -0.1, float("nan"))),
    *({"max_new_tokens": n} for n in (0, 5, -1)),
    *({"sampling_seed": s} for s in (0, -3, 2**63 - 1, None, 2**63, -(2**63) - 1, "7")),
    *({"ignore_eos": v} for v in (True, False, None)),
    *({"stop_token_ids": v} for v in ([], [3], None)),
    {"temperature": 0.0, "top_k": 50},
    {"repetition_penalty": 1.0, "frequency_penalty": None, "min_new_tokens": 0},
    {"max_tokens": 3},
    *({"min_new_tokens": 2}, {"stop": "x"}, {"stop_regex": "x"}),  # SGLang refuses them without a tokenizer
]
NOT_SERVED: list[dict[str, Any]] = [  # SGLang accepts them, the embedded engine refuses them
    {"frequency_penalty": 0.5},
    {"presence_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"logit_bias": {"3": 1.0}},
    {"regex": "a+"},
    {"max_new_tokens": None},
    {"stop_token_ids": [3, None]},
]


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Every combination of cuts, over random distributions where none is decided by rounding, and at boundaries."""
    g = torch.Generator().manual_seed(0)
    out = []
    for top_k, top_p, min_p in itertools.product((-1, 1, 2, 5, 40), (1.0, 0.2, 0.5, 0.9), (0.0, 0.05, 0.3, 1.0)):
        out.append({"p": HALVES, "top_k": top_k, "top_p": top_p, "min_p": min_p})
        for sharpness in (0.3, 1.0, 3.0, 5.0):
            p = (torch.randn(32, generator=g) * sharpness).softmax(-1)
            likeliest = p.sort(descending=True).values.double()
            if (likeliest.cumsum(0) - top_p).abs().min() > 1e-5 or top_p == 1:
                out.append({"p": p.tolist(), "top_k": top_k, "top_p": top_p, "min_p": min_p})
    return out


@pytest.fixture(scope="module")
def sglang(rows: list[dict[str, Any]]) -> dict[str, Any]:
    done = subprocess.run(
        [str(PYTHON), str(PROGRAMS / "kept_by_sglang.py")],
        input=json.dumps({"rows": rows, "params": READ + NOT_SERVED}),
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_the_same_tokens_are_kept(sglang: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    assert len(rows) > 250
    sizes = set()
    for row, theirs in zip(rows, sglang["kept"], strict=True):
        cuts = {k: torch.tensor([row[k]]) for k in ("top_k", "top_p", "min_p")}
        weights, ids = kept(torch.tensor([row["p"]]), **cuts)
        ours = sorted(ids[weights > 0].tolist())
        if row["p"] is HALVES and len(theirs) == 4:  # of two equals SGLang keeps either
            ours, theirs = (sorted({1: 3}.get(i, i) for i in side) for side in (ours, theirs))
        assert ours == theirs, row
        sizes.add(len(ours))
    assert len(sizes) > 12


def test_parameters_are_read_alike(sglang: dict[str, Any]) -> None:
    for params, theirs in zip(READ, sglang["params"], strict=False):
        try:
            (s,) = GenerateRequest.from_json({"input_ids": [1], "sampling_params": params}).sampling
            ours = [bool(s.top_k == 1 or np.float32(s.temperature) < np.float32(1e-6)), s.max_new_tokens]
        except ValueError:
            ours = None
        assert ours == theirs, params


def test_what_is_not_served_is_refused(sglang: dict[str, Any]) -> None:
    for params, theirs in zip(NOT_SERVED, sglang["params"][len(READ) :], strict=True):
        assert theirs is not None, params
        with pytest.raises(ValueError, match=r"not supported|is not an integer"):
            GenerateRequest.from_json({"input_ids": [1], "sampling_params": params})
