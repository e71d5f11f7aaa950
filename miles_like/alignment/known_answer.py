"""One fixed text, which the trainer scores before each publication and every server after it.

A server may answer that it holds the new weights and compute with old ones: an engine that fuses tensors within one
request keeps the old parameter when they arrive in two, and hashes do not tell, because those of a stock server are of
its own layout. The log-probabilities of a text depend on every weight.

The trainer scores with its own routes, so that it need not be asked once the servers have the weights. Only where a
server differs does it score again with the server's routes, which leaves what no near-tie of a router explains.

Letters: S tokens of the text, L MoE layers, K experts a token.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from miles_like.alignment.evidence import SampleTokens
from miles_like.alignment.live import LiveTrainer
from miles_like.types import Json
from rollout.sglang.client import ServerClient
from rollout.sglang.http_replies import RolloutError
from routing_replay.trace import RoutingTrace

_MEDIAN_OF_NORMAL = 0.6745  # of |x|, in standard deviations
_OF_TEXT = 2.0  # times what the precision explains of samples
_FACTOR = 4.0  # times the usual gap of publications that all servers passed
_PAST = 1000  # publications
_FLOOR = 1e-4  # least bound: differences of fp32 kernels
_ENOUGH = 16  # tokens whose median is no chance
_COARSE = 8.0  # nats: BF16 logits are spaced wider from 8 on, so that smaller log-probabilities are compared relatively
_LIKELY = math.log(0.1)  # tokens of a probability above this are compared, if they are enough


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A server whose log-probabilities of the text are not the trainer's, or that did not score it."""

    url: str
    gap: float  # median of |difference|, nats
    bound: float
    failure: str = ""  # of its request; then there is no gap

    def sentence(self) -> str:
        if self.failure:
            return self.failure
        return f"server {self.url} differs by {self.gap:.3g} nats, but the precision explains only {self.bound:.3g}"


@dataclass(slots=True, kw_only=True)
class KnownAnswer:
    """Call `expect` before a publication, with the weights that it will send, and `compare` after it.

    text: [S] int64 tokens. kl_max: the mean k3 that the precision explains (`allowance`). exact: both sides compute the
    same bits. usual: whether earlier publications lower the bound; not where a near-tie of a router is not known from a
    fault. The bound on the median difference is twice that of normally distributed differences with this k3, which is
    of tokens that the model samples: it expects those of the text less, and its logits, where BF16 is coarser, are
    larger there. Or, where lower, it is four times the median of all publications so far: a stale tensor among hundreds
    is a small fault; that takes a text of `_ENOUGH` different pairs of neighbours, because the median of few
    roundings is four times the usual one by chance. Tokens that the trainer expects are compared, if there are enough:
    the logarithm of a small probability is less precise.

    settings: what the usual gap depends on; a saved one of other settings is not restored.
    """

    trainer: LiveTrainer
    text: Tensor
    kl_max: float
    exact: bool = False
    usual: bool = True
    settings: str = ""
    rescored: bool = field(default=False, init=False)  # whether the last comparison asked the trainer
    _expected: Tensor | None = field(default=None)  # [S-1] fp32
    _replayed: dict[str, Tensor] = field(default_factory=dict)  # URL -> [S-1] fp32 with the routes of that server
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=_PAST))
    _pairs: int = field(init=False)  # different ones of two neighbouring tokens of the text

    def __post_init__(self) -> None:
        self._pairs = len(set(itertools.pairwise(self.text.tolist())))

    async def expect(self) -> None:
        """Scores the text with the trainer's weights. Collective over its ranks."""
        self._expected = (await self._by_trainer([None]))[0]
        self._replayed = {}

    async def compare(
        self, clients: Sequence[ServerClient], *, rescore: bool = True, near_ties: bool = False
    ) -> tuple[list[Disagreement], float]:
        """(servers that differ by more than is explained, the greatest gap of the others in nats, 0 without any).

        rescore: the trainer may be asked again, with the routes of servers that differ; `rescored` is then set. Without
        it, what the trainer answered since `expect` is used. near_ties: the trainer cannot be asked, so that a near-tie
        of a router is allowed for: the bound is that of the precision.
        """
        assert self._expected is not None, "compare before expect"
        answers = await asyncio.gather(*(self._scored(client) for client in clients))
        bound, self.rescored = self.explained if near_ties else self.bound, False
        failed = {c.url: a for c, a in zip(clients, answers, strict=True) if isinstance(a, str)}
        found = {c.url: a for c, a in zip(clients, answers, strict=True) if not isinstance(a, str)}
        gaps = {url: self._least_gap(url, scores) for url, (scores, _) in found.items()}
        unclear = [u for u, gap in gaps.items() if not gap <= bound and found[u][1] is not None]
        if rescore and unclear and self.trainer.shape is not None:
            self.rescored = True
            again = await self._by_trainer([found[url][1] for url in unclear])
            self._replayed |= dict(zip(unclear, again, strict=True))
            gaps |= {url: self._least_gap(url, found[url][0]) for url in unclear}
        wrong = [Disagreement(url, math.nan, bound, why) for url, why in failed.items()]
        wrong += [Disagreement(url, gap, bound) for url, gap in gaps.items() if not gap <= bound]
        most = max((gap for gap in gaps.values() if gap <= bound), default=0.0)
        if not wrong:
            self._usual.append(most)
        return wrong, most

    async def _scored(self, client: ServerClient) -> tuple[Tensor, RoutingTrace | None] | str:
        """A server's log-probabilities [S-1] and routes, or why there are none."""
        try:
            ((scores, trace),) = await client.score([self.text])
        except RolloutError as e:
            return str(e)
        return scores, trace

    def state(self) -> Json:
        """The gaps of past publications, for a checkpoint."""
        return {"settings": self.settings, "gaps": list(self._usual)}

    def restore(self, state: Any) -> None:
        """Restores `state` where it is of these settings; the bound then starts where the saved run's was."""
        if state["settings"] == self.settings:
            self._usual.extend(state["gaps"])

    @property
    def bound(self) -> float:
        """On the median of |difference|, nats."""
        if not (self.usual and self._usual and self._pairs >= _ENOUGH):
            return self.explained
        return min(self.explained, max(_FACTOR * statistics.median(self._usual), _FLOOR))

    @property
    def explained(self) -> float:
        """The bound by the precision alone, nats."""
        return 0.0 if self.exact else _OF_TEXT * _MEDIAN_OF_NORMAL * math.sqrt(2 * self.kl_max)

    def _least_gap(self, url: str, found: Tensor) -> float:
        """To what the trainer expects with its own routes or with those that this server sent. A nan, which is greater
        than every bound, where one of them is."""
        assert self._expected is not None
        gaps = [self._gap(found, x) for x in (self._expected, self._replayed.get(url)) if x is not None]
        return math.nan if any(map(math.isnan, gaps)) else min(gaps)

    def _gap(self, found: Tensor, expected: Tensor) -> float:
        """A nan is greater than every bound."""
        apart = (found.double() - expected.double()).abs()
        if not bool(apart.isfinite().all()):
            return math.nan
        if self.exact:
            return float(apart.max())
        apart *= _COARSE / expected.double().abs().clamp(min=_COARSE)
        likely = expected > _LIKELY
        return float((apart[likely] if int(likely.sum()) >= _ENOUGH else apart).median())

    async def _by_trainer(self, routes: Sequence[RoutingTrace | None]) -> list[Tensor]:
        """[S-1] for each of `routes`: with them, or for None with the trainer's own."""
        masks = torch.ones(len(self.text), dtype=torch.bool)
        masks[0] = False
        tokens = SampleTokens(ids=(self.text,) * len(routes), masks=(masks,) * len(routes))
        replayed = [trace.experts.long() for trace in routes if trace is not None]
        scores = await self.trainer.score(tokens, temperature=1.0, routes=replayed or None)
        return [x[1:] for x in scores.logprobs]


def text_of(prompts: Sequence[Sequence[int]], length: int) -> Tensor:
    """The first `length` tokens of the prompts one after the other, which may be fewer: [S] int64, at least two. Raises
    ValueError where no prompt has a token."""
    ids: list[int] = []
    for prompt in prompts:
        ids += prompt
        if len(ids) >= length:
            break
    if not ids:
        raise ValueError("no prompt has a token, so servers cannot score one: set publish.answer_tokens = 0")
    return torch.tensor((ids * 2)[: max(2, min(length, len(ids)))])
