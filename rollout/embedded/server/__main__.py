"""`python -m rollout.embedded.server`."""

import sys

from rollout.embedded.server.app import main

if __name__ == "__main__":
    sys.exit(main())
