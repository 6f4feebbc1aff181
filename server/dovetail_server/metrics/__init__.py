"""`GET /metrics`: what the server counts, in Prometheus' text format.

`tally.py` counts, as an observer that any plugin could be; `series.py` says under which names; `exposition.py` writes.
"""
