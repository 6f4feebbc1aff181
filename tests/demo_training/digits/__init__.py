"""How the bundled model that reads numbers in images is made: drawn pictures, a trainer and an evaluation.

Its weights are of three runs, each `--from` the one before: the tower alone for one minute of processor time, then the
whole model for two and for 3.4 minutes. The places of digits became labels with the last one.
"""
