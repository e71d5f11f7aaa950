"""Checks that a checkpoint's chat templates render in bounded time and memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

from miles_like.hf import template_worker

_WALL_S = 120.0  # generous, for a busy machine: the limit that counts is the worker's CPU time


def check_template_of(tokenizer: Any, where: str) -> None:
    """`check_templates` for all templates of a transformers tokenizer."""
    if template := tokenizer.chat_template:
        check_templates([template] if isinstance(template, str) else list(template.values()), where)


def check_templates(templates: list[str], where: str) -> None:
    """Render chat templates once in a process with limits on CPU time and memory. Raises ValueError for a template that
    exceeds them: it would hang the run or exhaust the machine's memory."""
    worker = [sys.executable, "-P", template_worker.__file__, str(os.getpid())]
    try:
        code = subprocess.run(
            worker, input=json.dumps(templates), text=True, capture_output=True, timeout=_WALL_S
        ).returncode
    except subprocess.TimeoutExpired:
        code = -signal.SIGXCPU
    if code in (-signal.SIGXCPU, -signal.SIGKILL, template_worker.OUT_OF_MEMORY):
        taken = (
            f"{template_worker.MEMORY >> 30} GiB of memory"
            if code == template_worker.OUT_OF_MEMORY
            else f"{template_worker.CPU_S} s of CPU time"
        )
        raise ValueError(f"{where}: its chat template takes more than {taken} for 4 messages: fix chat_template.jinja")
    if code:
        raise RuntimeError(f"{where}: the process that test-renders its chat template ended with status {code}")
