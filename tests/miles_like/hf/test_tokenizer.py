"""Chat templates are programs of a checkpoint: those that do not end, or take all memory, are one sentence at load."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from miles_like.hf.template_limits import check_templates
from miles_like.hf.tokenizer import load_tokenizer
from tests.support.refusals import Facts, refuses

TINY = Path(__file__).parents[3] / "configs" / "tiny"
LOOP = "{% for i in range(99999) %}"
ENDLESS = LOOP * 3 + "{% endfor %}" * 3


@pytest.mark.parametrize(
    ("template", "facts"),
    [
        (ENDLESS, (5, "CPU", 4)),
        ("{{ 'x' * 10**10 }}", (1, "GiB", 4)),
        ("{% if messages|length > 3 %}{{ 'x' * 10**10 }}{% endif %}", (1, "GiB")),
    ],
)
def test_a_template_without_an_end_is_refused(template: str, facts: Facts, tmp_path: Path) -> None:
    for file in TINY.glob("*token*"):
        shutil.copy(file, tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with refuses(ValueError, *facts) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


PARENT = f"""
from miles_like.hf import template_limits
template_limits.check_templates([{ENDLESS!r}], "here")
"""


def test_the_worker_ends_with_a_parent_that_is_killed() -> None:
    """In the middle of a loop, before its own limit of CPU time."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT])
    try:
        found: list[psutil.Process] = []
        while not found or found[0].cpu_times().user < 0.5:
            assert parent.poll() is None
            found = psutil.Process(parent.pid).children()
            time.sleep(0.02)
        found[0].suspend()  # it uses no more CPU time, so that nothing but its parent's end ends it
    finally:
        parent.kill()
        parent.wait()
    _, alive = psutil.wait_procs(found, timeout=60)
    for process in alive:
        process.kill()
    assert not alive


def test_templates_that_end_are_taken() -> None:
    """Also those that reject a conversation or use names that transformers alone gives."""
    assert load_tokenizer(TINY).chat_template
    check_templates(["{{ raise_exception('roles must alternate') }}", "{{ no_such(1) }}", "{% broken", ""], "here")
