"""Mutated and forged inputs. `test_*.py` are a bounded tier in the suite, `python -m tests.fuzz` a long one.

A target is a module of `tests/fuzz/targets` with `CASES`, how many the long tier plays, and `run(cases, seed)`, which
plays them and returns figures. Targets on files also have `draw(rng)`, a case as JSON, and `play(case, folder)`, what
came of it; cases that failed are kept in `tests/fuzz/corpus/<target>/` and replayed in the bounded tier.
"""
