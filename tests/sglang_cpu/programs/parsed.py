"""Run by SGLang's own Python: what its parser makes of command lines, as JSON from stdin to stdout.

In:  {"commands": [words after `-m sglang.launch_server`], "names": [attribute of ServerArgs]}
Out: for each command {name: value}, or {"refused": message}
"""

from __future__ import annotations

import json
import sys

from sglang.srt.server_args import prepare_server_args


def parsed(words: list[str], names: list[str]) -> dict:
    try:
        found = prepare_server_args(words)
    except (Exception, SystemExit) as e:  # whatever it is, it would end a server
        return {"refused": f"{type(e).__name__}: {e}"}
    return {name: getattr(found, name) for name in names}


asked = json.load(sys.stdin)
found = [parsed(words, asked["names"]) for words in asked["commands"]]
print("\n" + json.dumps(found))
