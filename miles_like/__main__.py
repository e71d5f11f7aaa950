"""`python -m miles_like` is the command `miles-like`."""

from miles_like.cli import main

main()
