"""What `miles-like diagnose` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from miles_like.config.load import load_config
from miles_like.diagnosis.sample import Trained, life_of
from miles_like.diagnosis.seconds import LAST, Share, shares, tail_of_lengths, traced_steps
from miles_like.limits.regular_files import check_inside, json_lines, parse_json, read_text
from miles_like.report.console import counted
from miles_like.report.rows import read_metrics
from miles_like.report.traces.chrome import read_trace
from miles_like.report.traces.writer import trace_files
from miles_like.run.verify import ROLLOUTS_BYTES

_LENGTHS = 10  # steps whose answers' lengths are read, the last ones
_TEXT = 2000  # characters of a prompt or response


def step_lines(run_dir: Path) -> list[str]:
    """What bounds the step of a run, the largest part first. Raises ValueError for a directory without steps."""
    rows = read_metrics(run_dir / "metrics.jsonl")
    config = load_config(run_dir / "config.toml")
    spans = [span for path in trace_files(run_dir) for span in read_trace(path)]
    traced = traced_steps(spans)
    estimated = None if traced else tail_of_lengths(_lengths(run_dir))
    found = shares(rows, traced, estimated, config.parallel.pp)
    total = sum(share.seconds for share in found)
    steps = len([row for row in rows if "perf/step_s" in row][-LAST:])
    lines = [f"A step takes {_seconds(total)} (mean of the last {steps} steps but the first):"]
    lines += [_line(share, total) for share in found]
    if not traced:
        part = "`training` includes ranks that wait, and packing waste"
        if any("perf/rollout_s" in row for row in rows):
            how = "" if estimated is None else "; `longest samples` is estimated from the lengths of answers"
            part = f"`sampling` includes rewards, the driver and waits between phases{how}"
        lines.append(f"The run was not traced: {part}. Continue it with --resume --set trace.on=true to measure them")
    return lines


def _line(share: Share, total: float) -> str:
    return f"{_seconds(share.seconds):>9}  {share.seconds / total:4.0%}  {share.what}: {share.remedy}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.3f} s"


def _lengths(run_dir: Path) -> Iterator[Sequence[int]]:
    files = [p for p in (run_dir / "rollouts").glob("step_*.jsonl") if p.stem.removeprefix("step_").isdecimal()]
    for path in sorted(files, key=lambda p: int(p.stem.removeprefix("step_")))[-_LENGTHS:]:
        check_inside(path, run_dir)
        yield [int(parse_json(line)["tokens"]) for line in json_lines(read_text(path, ROLLOUTS_BYTES))]


def sample_lines(run_dir: Path, key: str) -> list[str]:
    """The whole life of a sample. Raises ValueError as `life_of`."""
    life = life_of(run_dir, key, read_metrics(run_dir / "metrics.jsonl"))
    lines = [f"{life.key}: trained in {counted(len(life.trained), 'step')}"]
    for one in life.trained:
        lines += _trained_lines(one)
    lines += [f"step {step}: {n} samples of its prompt were discarded: {why}" for step, why, n in life.discarded]
    return [_printable(line) for line in lines]


def _trained_lines(one: Trained) -> Iterator[str]:
    row = one.row
    yield f"step {one.step}"
    yield f"  prompt: {_short(row.get('prompt'))}"
    yield f"  response: {_short(row.get('response'))}"
    yield f"  answer: {_short(row.get('answer'))}"
    spans = ", ".join(f"{version} (tokens {start} to {end - 1})" for version, start, end in row.get("versions", ()))
    yield f"  {row.get('tokens')} tokens, ended by {row.get('finish')}; weight versions: {spans or 'none'}"
    if row.get("logprob_mean") is not None:
        yield f"  mean log-prob: {row['logprob_mean']:.4f}"
    of_step = "" if one.of_step is None else f"; of the step's samples {one.of_step:.4f}"
    if one.agreement is None:
        yield f"  routes: not compared with the trainer's own{of_step}"
    else:
        yield f"  routes: the trainer's routers choose {one.agreement:.4f} of its recorded experts too{of_step}"
    parts = ", ".join(f"{name} {value:.4g}" for name, value in row.get("reward_parts", {}).items())
    group = ", ".join(f"{reward:.4g}" for reward in one.rewards)
    yield f"  reward: {row.get('reward'):.4g}{f' ({parts})' if parts else ''}; of its group: {group}"
    if one.advantage is None:
        yield "  advantage: not written by this version of the run"
    else:
        yield f"  advantage: {one.advantage:.4f}; share of the step's loss: {one.loss_share or 0.0:.2%}"
    if one.spans:
        began = one.spans[0].start
        for span in one.spans:
            at = f"{(span.start - began) / 1e9:8.3f} s + {span.took / 1e9:7.3f} s"
            yield f"  {at}  {span.name} ({span.process})"
    else:
        yield "  times: the step was not traced (trace.on = true)"


def _short(value: object) -> str:
    text = str(value)
    shown = text if len(text) <= _TEXT else f"{text[:_TEXT]}... ({len(text)} characters)"
    return repr(shown)


def _printable(line: str) -> str:
    """Run directories may be of others: what would change a terminal is escaped."""
    return line if line.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)
