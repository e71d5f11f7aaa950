"""Worker process that renders chat templates of a checkpoint once: `python -P template_worker.py PARENT_PID < JSON list
of templates`.

A template is a program by the author of the checkpoint: nested loops and 'x' * 10**10 keep a renderer busy for ever or
take all memory. The worker has CPU_S seconds and MEMORY bytes, and is killed when its parent ends. Exit status 0 when
every template was rendered or failed in time.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S, MEMORY = 5, 1 << 30
OUT_OF_MEMORY = 3  # exit status
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3?"},
]


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def main() -> None:
    """Renders with the sandbox, extension and functions that transformers uses (utils/chat_template_utils.py)."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the directory that holds miles_like
    from miles_like.limits.child_process import die_with_parent, set_soft_limit

    die_with_parent(int(sys.argv[1]))
    templates = json.load(sys.stdin)
    for which, most in ((resource.RLIMIT_AS, MEMORY), (resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_CORE, 0)):
        set_soft_limit(which, most)
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda x, **options: json.dumps(x, ensure_ascii=False)
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": lambda form: "1 Jan 2025"}
    for template in templates:
        for messages in (TALK[1:2], TALK, TALK[1:3]):
            for prompt in (True, False):
                try:
                    environment.from_string(template).render(messages=messages, add_generation_prompt=prompt)
                except MemoryError:
                    sys.exit(OUT_OF_MEMORY)
                except Exception:  # a template may reject a conversation, or use names that only transformers defines
                    continue


if __name__ == "__main__":
    main()
