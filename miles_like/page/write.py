"""Writes the page of one run, or of several beside each other: one file, which fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from miles_like.limits.regular_files import replace_bytes
from miles_like.page.panels import layout
from miles_like.page.run_data import run_data, sample_data
from miles_like.report.rows import read_metrics

REPORT = "report.html"
SCRIPTS = ("dom.js", "plots.js", "samples.js", "live.js", "tabs.js")
# What a browser lets the page do: run its own scripts, by their hashes, and style itself; plotly writes style elements
POLICY = (
    "default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; connect-src {connect}; "
    "base-uri 'none'; form-action 'none'"
)


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run directory; returns its path. Raises ValueError when `metrics.jsonl` is missing,
    empty or damaged, and for another file of the run that is."""
    return write_page([run_dir], run_dir / REPORT)


def write_page(run_dirs: Sequence[Path], out: Path) -> Path:
    """Write the page of these runs to `out`. Raises ValueError as `write_report`."""
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent}, the directory of {out.name}, does not exist: create it")
    runs = [run_data(path, read_metrics(path / "metrics.jsonl")) for path in run_dirs]
    page = page_text(distinct_names(runs), [sample_data(path) for path in run_dirs])
    replace_bytes(out, page.encode("utf-8", "backslashreplace"))  # a name or text may hold a lone surrogate
    return out


def distinct_names(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs whose names are not distinct are numbered: curves are labelled with them."""
    names = [run["name"] for run in runs]
    if len(set(names)) < len(names):
        for number, run in enumerate(runs, 1):
            run["name"] = f"{run['name']} ({number})"
    return runs


def page_text(
    runs: Sequence[Mapping[str, Any]], samples: Sequence[Mapping[str, Any]], live: Mapping[str, Any] | None = None
) -> str:
    """live: settings of a page that a server renews (live.js); None: the page stays as it is."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    plotly, own = plotly_script(), script()
    hashes = " ".join(f"'sha256-{sha256(text)}'" for text in (plotly, own))
    environment = Environment(
        loader=PackageLoader("miles_like.page", "files"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    return environment.get_template("page.html.j2").render(
        title=" · ".join(run["name"] for run in runs),
        policy=POLICY.format(hashes=hashes, connect="'none'" if live is None else "'self'"),
        style=own_file("page.css"),
        data=embedded({"runs": runs, "tabs": layout(), "live": live}),
        samples=embedded(samples),
        script=own,
        plotly=plotly,
    )


def embedded(value: object) -> str:
    """JSON that stays data inside a script element: no text in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def script() -> str:
    """The page's own scripts, in one scope."""
    body = "\n".join(own_file(name) for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{body}\n}})();\n'


@cache
def own_file(name: str) -> str:
    return (files("miles_like.page") / "files" / name).read_text(encoding="utf-8")


@cache
def plotly_script() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def sha256(text: str) -> str:
    """As a Content-Security-Policy has it."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
