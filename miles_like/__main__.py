"""`python -m miles_like` is the command `miles-like`."""

from miles_like.cli import main

if __name__ == "__main__":
    main()
