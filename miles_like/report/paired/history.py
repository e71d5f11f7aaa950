"""The evaluations of a run: the best so far of each set, with which the next one is compared."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_like.alerts.rows import best_steps, kept_rows
from miles_like.protocols import Fencing
from miles_like.report.paired.bootstrap import difference
from miles_like.report.paired.scores import Line, eval_file, read_answers, scores_of, write_answers


class EvalHistory:
    """The evaluations of a run, in `evals/` of its directory."""

    def __init__(self, run_dir: Path, fence: Fencing | None = None, rows: Sequence[Mapping[str, float]] = ()) -> None:
        """rows: of metrics.jsonl so far, where a run resumes: their best evaluations are read again."""
        self._run_dir, self._fence = run_dir, fence
        self.best: dict[str, tuple[int, Mapping[str, float]]] = {}  # set -> step, scores by problem
        for name, step in best_steps(kept_rows(rows)).items():
            if (path := eval_file(run_dir, step)).exists():
                self.best[name] = step, scores_of(read_answers(path)).get(name, {})

    def add(self, step: int, lines: Sequence[Line]) -> dict[str, float]:
        """Writes the answers of an evaluation; returns `eval/{set}/regression` of each set that was evaluated before.
        Raises as `Fencing.check`, and has written nothing then."""
        if self._fence is not None:
            self._fence.check()
        write_answers(eval_file(self._run_dir, step), lines)
        out = dict[str, float]()
        for name, scores in scores_of(lines).items():
            at, best = self.best.get(name, (step, {}))
            if at != step and (found := difference(best, scores)) is not None:
                out[f"eval/{name}/regression"] = found.fallen
            if not best or _mean(scores) > _mean(best):
                self.best[name] = step, scores
        return out


def _mean(scores: Mapping[str, float]) -> float:
    return statistics.fmean(scores.values())
