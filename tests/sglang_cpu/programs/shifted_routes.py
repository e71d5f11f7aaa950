"""The command line of a run to which the routes of version 2 and later come shifted by a row, in the layers from FIRST
to the last of LAYERS:

    python tests/sglang_cpu/programs/shifted_routes.py FIRST LAYERS train CONFIG ...
"""

from __future__ import annotations

import sys

from tests.support import mid_run

if __name__ == "__main__":
    from miles_like.cli import main

    first, layers = (int(word) for word in sys.argv[1:3])
    mid_run.plant_routes(mid_run.shifted, 2, layers=range(first, layers), depth=layers)
    del sys.argv[1:3]
    main()
