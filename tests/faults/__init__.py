"""The fault matrix and the soak. `test_*.py` are a bounded part in the suite; `python -m tests.faults` plays the cells.

A cell is a role, a moment and a kind of fault (cells.py, which also says what must happen). `plain.py` plays a cell on
plain processes, `spread.py` one on nodes of namespaces with Ray; `points.py` has the moments and `effects.py` the
faults that strike there. Results are lines of results.jsonl, from which page.py writes a section of
docs/reliability.md.
"""
