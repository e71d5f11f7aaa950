"""A reward server that is away is waited for by a run, and by a run alone."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from miles_like.config.sections.reward import RewardConfig
from miles_like.rewards import scorer
from miles_like.rewards.load import OUTAGE_S, Rewards
from miles_like.types import Score, Unscored
from tests.miles_like.rewards.judges.test_reward_servers import PROMPT, Scoring, asked, completion
from tests.support.made_samples import sample


@pytest.mark.parametrize("name", ["remote", "judge"])
def test_a_server_that_is_away_is_waited_for_longer_than_the_retries(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line when it goes and one when it is back; further calls meanwhile do not wait longer."""
    monkeypatch.setattr(scorer, "_SHORTEST_S", 0.001)
    path, reply = {"remote": ("/score", 1.0), "judge": ("/v1/chat/completions", completion("Score: 10"))}[name]
    with Scoring(reply) as server:
        faults = iter(["http_500"] * 8)
        server.fault[path] = lambda body: next(faults, "none")
        found = asked(name, server, path=path if name == "remote" else "", retries=0, outage_s=60)
    assert [o.value for o in found if isinstance(o, Score)] == [1.0] and len(server.calls) == 9
    away, back = caplog.messages
    assert "HTTP 500" in away and "reward.outage_s = 60" in away and "answers again" in back


def test_a_server_that_stays_away_is_given_up_once_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a planted clock: each wait takes as long as it asks for. All day: ten minutes, and then at once."""
    now, waits = [0.0], list[float]()

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    limits = scorer.Limits(retries=2, retry_wait_s=1.0, outage_s=600.0)
    gone = Unscored(reason="no reply", away=True)

    async def away(prompts: object, samples: object) -> Unscored:
        return gone

    async def run() -> None:
        reward = scorer.Scorer(call=away, limits=limits)
        pair = [PROMPT], [sample()]
        assert await reward(*pair) == [gone] and 600 <= now[0] < 640
        assert waits[:6] == [1, 2, 4, 8, 16, 30] and max(waits) == 30
        began, asked_before = now[0], len(waits)
        assert await reward(*pair) == [gone]
        assert now[0] - began == 3 and waits[asked_before:] == [1, 2]

    monkeypatch.setattr(scorer, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": sleep}))
    monkeypatch.setattr(scorer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asyncio.run(run())


def test_only_a_run_waits_for_a_server_that_is_away() -> None:
    """An evaluation says at once that the address is wrong; what the configuration sets holds for both."""
    given = {"name": "remote", "remote": {"url": "http://127.0.0.1:9"}}
    for more, waits in (({}, (0.0, 600.0)), ({"outage_s": 7}, (7, 7)), ({"outage_s": 0}, (0, 0))):
        config = RewardConfig.model_validate({**given, **more})
        made = [Rewards(config)(None), Rewards(config, outage_s=OUTAGE_S)(None)]
        assert tuple(one.limits.outage_s for one in made if isinstance(one, scorer.Scorer)) == waits
    with pytest.raises(ValueError, match="outage_s"):
        RewardConfig.model_validate({"name": "gsm8k", "outage_s": 7})
