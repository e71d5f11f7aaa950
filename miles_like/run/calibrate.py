"""`miles-like calibrate`: accuracy and biases of rewards that need no answer, on held-out pairs and examples."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table

from miles_like.config.load import checked, parse_override, read_tree
from miles_like.config.sections.reward import Plain, RewardConfig, RewardModelConfig
from miles_like.config.sections.supervised import SupervisedConfig
from miles_like.hf.tokenizer import load_tokenizer
from miles_like.protocols import RewardFn
from miles_like.rewards.calibration import (
    REFUSAL,
    Pair,
    PairScores,
    Scores,
    agreement,
    choices,
    counter_examples,
    counter_figures,
    dressed,
    figures,
    padded,
)
from miles_like.rewards.load import Rewards
from miles_like.sandbox.config import SandboxConfig
from miles_like.section import Section
from miles_like.stopping import run_to_end
from miles_like.types import Finish, Prompt, Sample, Score
from rollout.prompts.config import DataConfig
from rollout.prompts.dataset import read_rows


class CalibrateConfig(Section):
    """The sections of a run's configuration that a calibration reads."""

    data: DataConfig = DataConfig(train="")
    reward: RewardConfig = RewardConfig()
    sandbox: SandboxConfig = SandboxConfig()
    supervised: SupervisedConfig = SupervisedConfig()


def read_calibration_config(path: Path | None, overrides: Sequence[str]) -> CalibrateConfig:
    """Raises ValueError for an invalid configuration or override."""
    known = CalibrateConfig.model_fields
    for text in overrides:
        if (section := next(iter(parse_override(text)))) not in known:
            raise ValueError(f"--set {text}: a calibration reads only {', '.join(known)}, not {section!r}: remove it")
    tree = {k: v for k, v in read_tree(path, overrides).items() if k in known}
    tree["data"] = {"train": "", **tree.get("data", {})}
    return checked(CalibrateConfig, tree, "--set" if path is None else str(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """Figures of each reward, and of each two of them."""

    pairs: int
    of_reward: Mapping[str, Mapping[str, float]]
    together: Mapping[tuple[str, str], Mapping[str, float]] = field(default_factory=dict)

    def tables(self) -> list[Table]:
        """For the console: one with a column for each reward, and for several one of their agreement."""
        out = Table(f"{self.pairs} pairs", *self.of_reward)
        for key in dict.fromkeys(key for found in self.of_reward.values() for key in found):
            out.add_row(key, *(_number(found.get(key)) for found in self.of_reward.values()))
        if not self.together:
            return [out]
        both = Table("", *(f"{a} and {b}" for a, b in self.together))
        for key in ("same_choice", "kappa"):
            both.add_row(key, *(_number(found.get(key)) for found in self.together.values()))
        return [out, both]

    def write_json(self, path: Path) -> None:
        """One object: the number of pairs, the figures of each reward, and of each two, under "A and B"."""
        together = {f"{a} and {b}": dict(found) for (a, b), found in self.together.items()}
        whole = {"pairs": self.pairs, "rewards": dict(self.of_reward), "agreement": together}
        path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


def calibrate(
    config: CalibrateConfig, names: Sequence[str], data: str, limit: int | None, tokenizer: Path | None
) -> Calibrated:
    """Scores the pairs of `data`, changed forms of their answers, and the package's counter-examples by each reward.

    tokenizer: directory whose chat template makes the prompts, with data.template = "chat". Raises ValueError for rows
    that are no pairs, for an unknown reward, and for one that reads token ids.
    """
    if len(set(names)) != len(names) or not names:
        raise ValueError(
            f"the rewards are {', '.join(names) or 'none'}: pass one or more rewards, each once, with --by"
        )
    rewards = Rewards(config.reward, sandbox=config.sandbox)
    made = {name: rewards(name) for name in names}
    for name in names:
        part = config.reward.part(name)
        if isinstance(part, RewardModelConfig) and part.send == Plain(send="tokens"):
            raise ValueError(
                f"--by {name}: reward.reward_model.send = 'tokens' sends the policy's token ids, but pairs are "
                "text: set it to 'text' or 'chat'"
            )
    pairs = read_pairs(config, data)[:limit]
    template = _Template(config.data.template == "chat", tokenizer)
    return run_to_end(_calibrated(rewards, made, pairs, template))


def read_pairs(config: CalibrateConfig, path: str) -> list[Pair]:
    """Raises ValueError naming file, row and column."""
    rows, keys = read_rows(path), config.supervised
    columns = (config.data.prompt_key or "prompt", keys.chosen_key, keys.rejected_key)
    out = []
    for i, row in enumerate(rows):
        try:
            texts = [_text(row.get(column), column) for column in columns]
        except ValueError as e:
            raise ValueError(f"{rows.where(i)}: {e}") from None
        answer = row.get(config.data.answer_key or "answer")
        out.append(Pair(prompt=texts[0], better=texts[1], worse=texts[2], answer="" if answer is None else str(answer)))
    return out


def _text(value: object, column: str) -> str:
    """A text, or the last message of a conversation."""
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    if not isinstance(value, str) or not value:
        raise ValueError(
            f"column {column!r} is {value!r:.100}, expected text: set data.prompt_key, supervised.chosen_key or "
            "supervised.rejected_key"
        )
    return value


class _Template:
    """Prompts as a reward gets them in a run."""

    def __init__(self, chat: bool, tokenizer: Path | None) -> None:
        if chat and tokenizer is None:
            raise ValueError(
                "data.template = 'chat' needs a chat template: pass --tokenizer DIR with the policy's tokenizer"
            )
        self._tokenizer = load_tokenizer(tokenizer) if chat and tokenizer is not None else None

    def prompt(self, name: str, pair: Pair) -> Prompt:
        message = {"role": "user", "content": pair.prompt}
        text = pair.prompt
        if self._tokenizer is not None:
            text = str(self._tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
        messages = () if self._tokenizer is None else (message,)
        return Prompt(id=name, token_ids=(0,), answer=pair.answer, text=text, messages=messages)


async def _calibrated(
    rewards: Rewards, made: Mapping[str, RewardFn], pairs: Sequence[Pair], template: _Template
) -> Calibrated:
    counters = counter_examples()
    of_reward: dict[str, dict[str, float]] = {}
    chosen = {}
    try:
        for name, reward in made.items():
            scores = PairScores(
                better=await _scores(reward, template, pairs, [p.better for p in pairs]),
                worse=await _scores(reward, template, pairs, [p.worse for p in pairs]),
                padded=await _scores(reward, template, pairs, [padded(p.better) for p in pairs]),
                dressed=await _scores(reward, template, pairs, [dressed(p.better) for p in pairs]),
                refused=await _scores(reward, template, pairs, [REFUSAL] * len(pairs)),
            )
            better = await _scores(reward, template, counters, [p.better for p in counters])
            worse = await _scores(reward, template, counters, [p.worse for p in counters])
            of_reward[name] = figures(pairs, scores) | counter_figures(counters, better, worse)
            chosen[name] = choices(scores.better, scores.worse)
    finally:
        await rewards.close()
    together: dict[tuple[str, str], dict[str, float]] = {}
    for a, b in itertools.combinations(made, 2):
        if (found := agreement(chosen[a], chosen[b])) is not None:
            same, kappa = found
            together[a, b] = {"same_choice": same} | ({} if kappa is None else {"kappa": kappa})
    return Calibrated(pairs=len(pairs), of_reward=of_reward, together=together)


async def _scores(reward: RewardFn, template: _Template, pairs: Sequence[Pair], answers: Sequence[str]) -> Scores:
    prompts = [template.prompt(f"pair {i}", p) for i, p in enumerate(pairs)]
    found = await reward(prompts, [_sample(p.id, text) for p, text in zip(prompts, answers, strict=True)])
    return [s.value if isinstance(s, Score) else None for s in found]


def _sample(prompt_id: str, text: str) -> Sample:
    """A text as an ended response; rewards of texts do not read its tokens, of which there is one a character."""
    n = len(text) + 1
    return Sample(
        prompt_id=prompt_id,
        index=0,
        token_ids=torch.zeros(n, dtype=torch.int64),
        loss_mask=torch.arange(n) > 0,
        logprobs=torch.zeros(n),
        routing=None,
        versions=(),
        finish=Finish.STOP,
        text=text,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
