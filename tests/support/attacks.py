"""Programs that attack a sandbox, and what must come of each.

Each prints HELD where the sandbox held, and BROKEN or anything else where not; or the sandbox ends it. Where a program
begins with the comment "with held" or "with refused", it is preceded by that function.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).parents[1] / "data" / "sandbox_attacks.txt"
HELPERS = {
    "held": """
import os, sys
def held(call, *kinds):
    try:
        print('BROKEN', call())
    except (kinds or (OSError,)) as e:
        print('HELD', type(e).__name__)
""",
    "refused": """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def refused(result):
    error = ctypes.get_errno()
    print('HELD' if result == -1 and error in (errno.EPERM, errno.ENOSYS, errno.EACCES) else ('BROKEN', result, error))
""",
}
# what an honest program sees after an attack in the same slot
PROBE = """
import os, sys
left = [f for d in ('/tmp', '/dev/shm') for f in os.listdir(d)]
others = {n for n in os.listdir('/proc') if n.isdigit()} - {'1', str(os.getpid())}
print('clean' if not left and not others and not sys.stdin.read() else (left, others))
"""


@dataclass(frozen=True)
class Attack:
    """ends: "exit", or the status with which the sandbox ends it; "any": it may end in any way."""

    name: str
    code: str
    ends: str


def attacks() -> list[Attack]:
    """Those of the file, whose sections begin with `### NAME : ENDS`."""
    found = re.split(r"^### (.*) : (\w+)\n", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    out = []
    for name, ends, code in zip(found[::3], found[1::3], found[2::3], strict=True):
        helper = re.match(r"# with (\w+)\n", code)
        out.append(Attack(name, (HELPERS[helper[1]] if helper else "") + code, ends))
    return out
