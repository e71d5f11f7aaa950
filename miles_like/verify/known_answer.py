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
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles_like.verify.evidence import SampleTokens
from miles_like.verify.live import LiveTrainer
from rollout.sglang.client import SGLangClient
from routing_replay.trace import RoutingTrace

_MEDIAN_OF_NORMAL = 0.6745  # of |x|, in standard deviations
_FACTOR = 4.0  # times the usual gap of publications that all servers passed
_PAST = 1000  # publications
_FLOOR = 1e-4  # least bound: differences of fp32 kernels
_LIKELY, _ENOUGH = math.log(0.1), 16  # tokens of a probability above this are compared, if they are so many


@dataclass(frozen=True, slots=True)
class Disagreement:
    """A server whose log-probabilities of the text are not the trainer's."""

    url: str
    gap: float  # median of |difference|, nats
    bound: float

    def sentence(self) -> str:
        return f"server {self.url} differs by {self.gap:.3g} nats, and {self.bound:.3g} is explained"


@dataclass(slots=True, kw_only=True)
class KnownAnswer:
    """Call `expect` before a publication, with the weights that it will send, and `compare` after it.

    text: [S] int64 tokens. kl_max: the mean k3 that the precision explains (`allowance`). exact: both sides compute the
    same bits. usual: whether earlier publications lower the bound; not where a near-tie of a router is not known from
    a fault. The bound on the median difference is that of normally distributed differences with this k3, or, where
    lower, four times the median of all publications so far: a stale tensor among hundreds is a small fault. Tokens that
    the trainer expects are compared, if there are enough: the logarithm of a small probability is less precise.
    """

    trainer: LiveTrainer
    text: Tensor
    kl_max: float
    exact: bool = False
    usual: bool = True
    _expected: Tensor | None = field(default=None)  # [S-1] fp32
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=_PAST))

    async def expect(self) -> None:
        """Scores the text with the trainer's weights. Collective over its ranks."""
        self._expected = (await self._by_trainer([None]))[0]

    async def compare(self, clients: Sequence[SGLangClient]) -> tuple[list[Disagreement], float]:
        """(servers that differ by more than is explained, the greatest gap of the others in nats, 0 without any)."""
        assert self._expected is not None, "compare before expect"
        answers = await asyncio.gather(*(client.score([self.text]) for client in clients))
        found = [scores for ((scores, _),) in answers]
        routes = [trace for ((_, trace),) in answers]
        gaps, bound = [self._gap(x, self._expected) for x in found], self.bound
        unclear = [i for i, gap in enumerate(gaps) if not gap <= bound and routes[i] is not None]
        if unclear and self.trainer.shape is not None:
            again = await self._by_trainer([routes[i] for i in unclear])
            for i, expected in zip(unclear, again, strict=True):
                gaps[i] = self._gap(found[i], expected)
        wrong = [Disagreement(c.url, g, bound) for c, g in zip(clients, gaps, strict=True) if not g <= bound]
        most = max((g for g in gaps if g <= bound), default=0.0)
        if not wrong:
            self._usual.append(most)
        return wrong, most

    @property
    def bound(self) -> float:
        """On the median of |difference|, nats."""
        if self.exact:
            return 0.0
        explained = _MEDIAN_OF_NORMAL * math.sqrt(2 * self.kl_max)
        if not (self.usual and self._usual):
            return explained
        return min(explained, max(_FACTOR * statistics.median(self._usual), _FLOOR))

    def _gap(self, found: Tensor, expected: Tensor) -> float:
        """A nan is greater than every bound."""
        apart = (found.double() - expected.double()).abs()
        if not bool(apart.isfinite().all()):
            return math.nan
        if self.exact:
            return float(apart.max())
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
