"""Kills at random moments of real launches: ``make chaos``, ``python -m benchmarks.chaos --kills N``.

studies: one study under fire, from its first tuner to its end.
checks: what must hold at the end of a study.
__main__: the command.
"""
