"""Writes report.html of a run directory: plots, figures, discarded samples, first and last samples, starts,
configuration. The page is one file, without anything that is fetched from elsewhere."""

from __future__ import annotations

import base64
import html
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from miles_like.checkpoint.ledger_audit import audit
from miles_like.limits.regular_files import MIB, check_inside, parse_json, read_own, replace_bytes
from miles_like.report.console import counted, first_last_best, headline_keys
from miles_like.report.provenance import starts

SHOWN_SAMPLES = 8
METRICS_BYTES, ROLLOUTS_BYTES, CONFIG_BYTES = 512 * MIB, 1024 * MIB, 16 * MIB  # largest file that is read
LARGEST = 1e100  # largest metric: far above any real one, and plots can be scaled to it
_SHOWN = ("index", "prompt", "response", "answer", "reward", "finish")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1080px; margin: 2em auto;
  padding: 0 1em; }
h1 { font-size: 1.5em; margin-bottom: 0; } h2 { font-size: 1.15em; margin-top: 2.2em; }
.sub { color: #666; margin-top: .2em; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); gap: 12px; }
.plots img { width: 100%; border: 1px solid #e4e4e4; border-radius: 6px; }
table { border-collapse: collapse; } th, td { padding: 3px 14px 3px 0; text-align: left; vertical-align: top; }
th { color: #666; font-weight: 600; } tr { border-bottom: 1px solid #eee; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
code, pre { font: 13px/1.45 ui-monospace, monospace; } pre { background: #f6f6f6; padding: 12px; overflow-x: auto; }
td code { white-space: pre-wrap; overflow-wrap: anywhere; }
.right { color: #00795a; } .wrong { color: #b04a00; }
"""


def write_report(run_dir: Path) -> Path:
    """Write `plots/*.png` and `report.html` into a run directory; returns the path of the latter.

    `config.toml`, `ledger.jsonl` and `rollouts/` are shown when they exist. Raises ValueError when `metrics.jsonl` is
    missing, empty or damaged.
    """
    from miles_like.report.plots import TITLES, write_plots  # imports matplotlib, which is slow

    rows = read_metrics(run_dir / "metrics.jsonl")
    check_inside(run_dir / "plots", run_dir)
    images = write_plots(rows, run_dir / "plots")
    name = html.escape(run_dir.resolve().name)
    body = "\n".join(
        [
            f"<h1>{name}</h1>",
            f'<p class="sub">{_subtitle(rows)}</p>',
            '<div class="plots">',
            *(_image(p, TITLES[p.stem]) for p in images),
            "</div>",
            "<h2>Figures</h2>",
            _figures(rows),
            *_ledger(run_dir / "ledger.jsonl"),
            *_rollouts(run_dir / "rollouts"),
            *_starts(run_dir),
            *_config(run_dir / "config.toml"),
        ]
    )
    path = run_dir / "report.html"
    page = (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{name}</title>\n'
        f"<style>{_STYLE}</style>\n<body>\n{body}\n</body>\n</html>\n"
    )
    replace_bytes(path, page.encode("utf-8", "backslashreplace"))  # a file's name or text may hold a lone surrogate
    return path


def _image(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img id="plot-{path.stem}" src="data:image/png;base64,{data}" alt="{title} over optimizer steps">'


def read_metrics(path: Path) -> list[dict[str, float]]:
    """Rows of a metrics file, one per step, ascending; null is nan.

    For a step written twice (again after a resume), the later value of each key is used. A last line cut short by a
    kill is ignored. Raises ValueError for a missing or empty file, one that is no regular file of the directory, or a
    line that is no JSON object of numbers with a step.
    """
    if not path.exists():
        raise ValueError(f"{path} does not exist: pass the directory of a run that has trained")
    lines = _text(path, path.parent, METRICS_BYTES).splitlines(keepends=True)
    rows: dict[float, dict[str, float]] = {}
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError as e:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise ValueError(f"{path} line {number} is damaged ({e}): remove that line") from e
        if not isinstance(row, dict) or type(row.get("step")) is not int or not 0 <= row["step"] < 1 << 53:
            raise ValueError(f"{path} line {number} is not an object with a step: remove that line")
        if wrong := [k for k, v in row.items() if not _is_figure(v)]:
            value = repr(row[wrong[0]])[:40]
            raise ValueError(
                f"{path} line {number}: {wrong[0][:80]} is {value}, expected a number within {LARGEST:g}: "
                "remove that line"
            )
        values = {k: math.nan if v is None else float(v) for k, v in row.items()}
        rows.setdefault(values["step"], {}).update(values)
    if not rows:
        raise ValueError(f"{path} has no step yet: wait for the run's first step, or pass another run directory")
    return [rows[s] for s in sorted(rows)]


def _is_figure(value: object) -> bool:
    """Whether `value` is valid for a metric: a number that can be drawn, null, or a number that is not finite (skipped
    in plots)."""
    if value is None or isinstance(value, bool):
        return True
    return isinstance(value, int | float) and (value != value or abs(value) in (math.inf,) or abs(value) <= LARGEST)


def _text(path: Path, directory: Path, limit: int) -> str:
    """The text of a file in the run directory."""
    try:
        return read_own(path, directory, limit).decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is damaged: it is not UTF-8 ({e}); remove it") from None


def _subtitle(rows: Sequence[Mapping[str, float]]) -> str:
    last = rows[-1]
    parts = [counted(int(last["step"]), "optimizer step")]
    if math.isfinite(last.get("wall_s", math.nan)):
        parts.append(f"{last['wall_s']:.0f} s")
    if math.isfinite(last.get("tokens_total", math.nan)):
        parts.append(f"{last['tokens_total']:,.0f} response tokens")
    return " · ".join(parts)


def _figures(rows: Sequence[Mapping[str, float]]) -> str:
    """The main metrics, then all of them in groups that are folded."""
    groups: dict[str, list[str]] = {}
    for key in dict.fromkeys(key for row in rows for key in row if key != "step"):
        groups.setdefault(key.partition("/")[0], []).append(key)
    out = [_table(rows, headline_keys(rows)), '<p class="sub">docs/metrics.md defines each metric.</p>']
    for name, keys in groups.items():
        out.append(f"<details><summary>{html.escape(name)} ({len(keys)})</summary>{_table(rows, keys)}</details>")
    return "\n".join(out)


def _table(rows: Sequence[Mapping[str, float]], keys: Sequence[str]) -> str:
    out = ['<table><tr><th>metric</th><th class="n">first</th><th class="n">last</th><th class="n">best</th></tr>']
    for key in keys:
        found = first_last_best(rows, key)
        if found is not None:
            cells = "".join(f'<td class="n">{"" if v is None else _number(v)}</td>' for v in found)
            out.append(f"<tr><td><code>{html.escape(key)}</code></td>{cells}</tr>")
    return "\n".join([*out, "</table>"])


def _number(value: float) -> str:
    """Four digits; all of a large number's: 49,612."""
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e15 else f"{value:.4g}"


def _ledger(path: Path) -> list[str]:
    """The section about issued, trained and discarded samples, from the ledger file alone; a sentence where none was
    discarded."""
    if not path.exists():  # a run without a rollout has no ledger
        return []
    check_inside(path, path.parent)
    found = audit(path)
    if found.steps and not (found.wrong or found.unfinished or found.reasons):
        return ['<p class="right">Every sample issued was trained once, or is in flight; none was discarded.</p>']
    out = ["<h2>Ledger</h2>"]
    if found.wrong is not None:
        out.append(f'<p class="wrong">{html.escape(found.wrong)}. Nothing after it is counted here.</p>')
    elif found.steps:
        out.append('<p class="right">Every sample issued was trained once, discarded once, or is in flight.</p>')
    if found.unfinished:
        out.append(f"<p>{found.unfinished} lines after the last complete step are of an unfinished step.</p>")
    if not found.steps:
        return out
    last = found.steps[-1]
    rows = [("issued", last.issued), ("trained", last.trained), ("in flight", last.in_flight)]
    rows += [(f"discarded: {reason}", n) for reason, n in found.reasons.items()]
    out.append(f'<table><tr><th>until step {last.step}</th><th class="n">samples</th><th class="n">share</th></tr>')
    out += [
        f'<tr><td>{html.escape(name)}</td><td class="n">{n:,}</td><td class="n">{n / max(last.issued, 1):.1%}</td></tr>'
        for name, n in rows
    ]
    return [*out, "</table>"]


def _rollouts(folder: Path) -> list[str]:
    """Of the first samples of all groups, at the first and the last step with a file, those of the highest and the
    lowest rewards."""
    files = {int(m[1]): p for p in folder.glob("step_*.jsonl") if (m := re.fullmatch(r"step_(\d+)\.jsonl", p.name))}
    out: list[str] = []
    for step in sorted({min(files), max(files)} if files else ()):
        firsts = sorted(_first_samples(files[step], folder.parent), key=_reward, reverse=True)
        half = SHOWN_SAMPLES // 2
        shown = firsts if len(firsts) <= SHOWN_SAMPLES else [*firsts[:half], *firsts[-half:]]
        which = "" if shown is firsts else f", the {half} of highest and the {half} of lowest reward"
        out.append(f"<h2>Samples at step {step}</h2>")
        out.append(f'<p class="sub">The first answer to each of {counted(len(firsts), "prompt")}{which}.</p>')
        out.append(
            '<table><tr><th>prompt</th><th>response</th><th>answer</th><th class="n">reward</th><th>end</th></tr>'
        )
        out += [_sample_row(s) for s in shown]
        out.append("</table>")
    return out


def _reward(sample: Mapping[str, object]) -> float:
    """For sorting: what is no finite number comes last."""
    reward = sample["reward"]
    if isinstance(reward, int | float) and math.isfinite(reward):
        return float(reward)
    return -math.inf


def _first_samples(path: Path, run_dir: Path) -> list[Mapping[str, object]]:
    """Raises ValueError naming a line that is no sample."""
    firsts: list[Mapping[str, object]] = []
    for number, line in enumerate(_text(path, run_dir, ROLLOUTS_BYTES).splitlines(), 1):
        try:
            sample = parse_json(line)
        except ValueError as e:
            raise ValueError(f"{path} line {number} is damaged ({e}): remove that line") from None
        missing = [k for k in _SHOWN if not isinstance(sample, dict) or k not in sample]
        if missing:
            raise ValueError(f"{path} line {number} is not a sample, it has no {missing[0]!r}: remove that line")
        if sample["index"] == 0:
            firsts.append({k: sample[k] for k in _SHOWN})
    return firsts


def _sample_row(sample: Mapping[str, object]) -> str:
    reward = sample["reward"] if _is_figure(sample["reward"]) else None
    positive = isinstance(reward, int | float) and reward > 0
    texts = "".join(f"<td><code>{html.escape(str(sample[k]))}</code></td>" for k in ("prompt", "response", "answer"))
    shown = f"{reward:g}" if isinstance(reward, int | float) else ""
    return (
        f'<tr>{texts}<td class="n {"right" if positive else "wrong"}">{shown}</td>'
        f"<td>{html.escape(str(sample['finish']))}</td></tr>"
    )


def _starts(run_dir: Path) -> list[str]:
    """Date, host, command, commit and versions of each start of the run."""
    found = starts(run_dir)
    if not found:
        return []
    out = ["<h2>Started</h2>", "<table>"]
    out.append("<tr><th>when</th><th>host</th><th>command</th><th>commit</th><th>versions</th></tr>")
    for one in found:
        versions = one.get("versions")
        names = versions.items() if isinstance(versions, dict) else ()
        cells = [str(one.get(key) or "") for key in ("started", "host", "command")]
        cells += [str(one.get("commit") or "")[:12], ", ".join(f"{name} {version}" for name, version in names)]
        out.append("<tr>" + "".join(f"<td><code>{html.escape(cell)}</code></td>" for cell in cells) + "</tr>")
    return [*out, "</table>"]


def _config(path: Path) -> list[str]:
    if not path.exists():
        return []
    return ["<h2>Configuration</h2>", f"<pre>{html.escape(_text(path, path.parent, CONFIG_BYTES))}</pre>"]
