"""Programs that tests need beside Python, of the Debian packages in tests/debian_packages.txt."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.support.namespaces import NEED


def need_programs(*names: str) -> None:
    """Skip the test where one is not installed, or fail it with MILES_LIKE_NEED_NAMESPACES=1, which .ci/run sets."""
    if missing := [name for name in names if shutil.which(name) is None]:
        (pytest.fail if os.environ.get(NEED) == "1" else pytest.skip)(
            f"this machine has no {', '.join(missing)}: install the Debian packages of tests/debian_packages.txt"
        )
