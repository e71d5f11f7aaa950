"""Law: with exact operations a sample is bit for bit the one of an engine that keeps nothing, whatever was cached.

Requests that begin as others did, many samples of one, prompts fed in pieces, aborts, flushes, pauses of all three
modes with new weights or none, more pages wanted than there are: drawn at random. A page found under other weights than
filled it, while it is written to, or in the place of another, would change tokens, log-probabilities, routes or gate
weights, and nothing else would tell. After each event every page has as many users as hold it, or is free.

Samples under way while weights changed are not compared (test_rows_under_changing_weights.py), only what may come of
their pages. Not covered: plain operations, where a sample is the same to rounding (test_engine.py).
"""

from __future__ import annotations

import base64
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from miles_like.types import Finish, NamedTensor, SamplingParams
from rollout.embedded.engine import engine as engine_module
from rollout.embedded.engine.engine import Engine, EngineLimits
from rollout.embedded.engine.requests import Completed, PromptSpec
from rollout.embedded.model.exact_ops import ExactOps
from rollout.embedded.server.service import Service
from rollout.wire.control import PauseMode
from tests.support.exactly import MODELS, generate
from tests.support.ranked import divided
from tests.support.tiny_models import random_tensors, write_checkpoint

REQUESTS, VERSIONS, LONGEST = 60, 3, 60
LONG = [pytest.mark.slow, pytest.mark.long(beside="tests/laws/test_prefix_cache.py")]
SLOTS = 112  # two samples: pages are taken again


def _tensors(model: str, version: int) -> dict[str, torch.Tensor]:
    """Of versions that have nothing in common."""
    torch.manual_seed(version)
    stock = random_tensors(MODELS[model])
    return {n: t * 3 + (t.dim() > 1) * 0.1 * version * torch.randn_like(t) for n, t in stock.items()}


def _service(path: Path, layout: str | None = None, **limits: bool) -> Service:
    """layout: of its ranks; None: one."""
    wanted = EngineLimits(
        max_running=3, max_total_tokens=SLOTS, context_length=LONGEST, prefill_tokens=40, page=4, gates=True, **limits
    )
    how: dict[str, Any] = {"version": "0", "ops": ExactOps()}
    return Service(path, wanted, **how) if layout is None else divided(path, wanted, layout, **how)


def _publish(s: Service, model: str, version: int) -> None:
    s.begin_update()
    s.update([NamedTensor(n, t) for n, t in _tensors(model, version).items()], flush_cache=False, version=str(version))
    s.end_update()


@dataclass
class World:
    """What has been asked of an engine, and what of it can be compared with what an engine that keeps nothing says."""

    model: str
    service: Service
    fresh: list[Service]  # of each version
    r: random.Random
    version: int = 0
    label: str = "0"
    changes: int = 0
    asked: int = 0
    taken: int = 0  # pages that could be found, taken for other tokens
    texts: list[tuple[int, ...]] = field(default_factory=list)
    pending: list[tuple[PromptSpec, int, list[Completed]]] = field(default_factory=list)
    cached: list[tuple[int, int]] = field(default_factory=list)  # tokens of a prompt that were cached, and all of them

    @property
    def engine(self) -> Engine:
        return self.service.engine

    def watch(self) -> None:
        prefixes, forget = self.engine.cache.prefixes, self.engine.cache.prefixes.forget

        def counted(page: int) -> None:
            self.taken += page in prefixes
            forget(page)

        prefixes.forget = counted  # type: ignore[method-assign]

    def ask(self) -> None:
        """A prompt that begins as one that was known before."""
        r = self.r
        known = r.choice(self.texts[-6:])
        end = r.choice([len(known), len(known), r.randint(1, len(known))])
        ids = [*known[:end], *r.choices(range(2, 100), k=r.choice([0, 1, 5]))]
        ids = ids[: LONGEST - 10]
        if r.random() < 0.4:
            ids = ids[: (len(ids) - 1) // 4 * 4 + 1]  # whole pages and one token
        if r.random() < 0.1:
            ids[0] = 1  # what follows is the same, and means something else
        spec = PromptSpec(
            rid=f"{self.asked}.",
            token_ids=tuple(ids),
            sampling=SamplingParams(max_new_tokens=r.choice([0, 1, 5, 10]), sampling_seed=r.randrange(99)),
            n=r.choice([1, 1, 1, 2, 5]),
            ignore_eos=True,
            logprob_start=r.choice([-1, -1, -1, 0, r.randint(0, len(ids))]),
            routing_start=r.choice([0, r.randint(0, len(ids))]),
            gates=True,
        )
        self.asked += 1
        self.pending.append((spec, self.changes, []))
        self.engine.submit(spec, self.pending[-1][2].extend)

    def befall(self) -> None:
        r, engine, at = self.r, self.engine, self.r.random()
        if at < 0.35 and self.asked < REQUESTS:
            self.ask()
        elif at < 0.39:
            engine.abort(f"{r.randrange(self.asked)}." if self.asked else "none")
        elif at < 0.40:
            assert engine.flush() == engine.idle
        elif at < 0.45:
            mode = r.choice(list(PauseMode))
            kept = mode is PauseMode.IN_PLACE and engine.running  # under way with pages of older weights
            engine.pause(mode)
            if self.version < VERSIONS and (kept or r.random() < 0.2):
                self.version += 1
                self.changes += 1
                self.label = str(self.version)
                _publish(self.service, self.model, self.version)
            elif r.random() < 0.1:
                self.changes += 1
                self.label = f"{self.version}{self.changes:03}"
                engine.set_version(self.label)
            engine.resume()
        else:
            engine.step()

    def accounted(self) -> None:
        cache, admission = self.engine.cache, self.engine._admission
        held = Counter(p for job in admission.jobs.values() for p in job.pages)
        held.update(p for entry in admission.queue for p in entry.pages)
        assert cache._users == [held[p] for p in range(cache.pages)]
        assert sorted(cache._free) == [p for p in range(cache.pages) if not held[p]]
        assert {name: p for p, name in cache.prefixes._hashes.items()} == cache.prefixes._pages

    def run(self) -> None:
        while self.asked < REQUESTS or self.pending:
            self.befall()
            self.accounted()
            for one in [p for p in self.pending if p[2]]:
                self.pending.remove(one)
                spec, changes, done = one
                for i, completed in enumerate(done):
                    if changes == self.changes:
                        self.compare(replace(spec, n=1, first_index=i), completed)
                    self.texts.append((*spec.token_ids, *completed.reply.output_ids.tolist()))
                if done[0].reply.finish is not Finish.ABORT:
                    self.cached.append((done[0].reply.cached_tokens, len(spec.token_ids)))

    def compare(self, spec: PromptSpec, got: Completed) -> None:
        [[want]] = generate(self.fresh[self.version].engine, [spec])
        assert not want.reply.cached_tokens
        if got.reply.finish is Finish.ABORT and not len(got.reply.output_ids):
            return
        n = len(got.reply.output_ids)
        assert got.reply.logprobs is not None and want.reply.logprobs is not None
        assert got.reply.output_ids.tolist() == want.reply.output_ids[:n].tolist()
        assert got.reply.logprobs.tolist() == want.reply.logprobs[:n].tolist()
        assert got.prompt_logprobs == want.prompt_logprobs
        for mine, theirs, kind in (
            (got.reply.routed_experts, want.reply.routed_experts, "<i4"),
            (got.reply.routed_weights, want.reply.routed_weights, "<f4"),
        ):
            rows = self._rows(mine, kind)
            assert len(rows) == len(spec.token_ids) + n - 1 - min(spec.routing_start or 0, len(spec.token_ids) + n - 1)
            np.testing.assert_array_equal(rows, self._rows(theirs, kind)[: len(rows)])
        versions = got.reply.row_versions
        assert (
            {versions} == {self.label}
            if isinstance(versions, str)
            else {s.version for s in versions or ()} <= {self.label}
        )

    def _rows(self, encoded: str | None, kind: str) -> NDArray[np.generic]:
        """[rows, layers * K]."""
        arch = self.engine.model.arch
        return np.frombuffer(base64.b64decode(encoded or ""), kind).reshape(-1, arch.layers * arch.routed)


@pytest.mark.parametrize(
    ("model", "piece", "layout"),
    [
        pytest.param("mla", 7, None, marks=pytest.mark.slow),
        ("gqa", 1024, None),
        pytest.param("mla", 7, "ep2", marks=LONG),
        pytest.param("gqa", 1024, "tp2", marks=LONG),
    ],
)
def test_what_is_cached_changes_no_bit(
    model: str, piece: int, layout: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on several ranks, which copy pages and compute under the same versions: they are compared with one rank."""
    monkeypatch.setattr(engine_module, "_PIECE", piece)
    path = write_checkpoint(tmp_path, MODELS[model], _tensors(model, 0))
    fresh = [_service(path, prefixes=False) for _ in range(VERSIONS + 1)]
    for version, s in enumerate(fresh):
        _publish(s, model, version)
    world = World(model, _service(path, layout), fresh, random.Random(piece))
    world.texts = [tuple(world.r.choices(range(2, 100), k=n)) for n in (5, 24, 40)]
    world.watch()
    world.run()
    assert world.version == VERSIONS and world.engine.cache.free_pages == world.engine.cache.pages
    assert {cached == 0 for cached, _ in world.cached} == {True, False}
    most = sum(cached > 8 for cached, _ in world.cached)
    assert most > 2 and world.taken > 9, f"blind: {most} long prefixes found, {world.taken} pages taken again"
    assert any(p - cached == 1 for cached, p in world.cached if cached), "all but one token"
