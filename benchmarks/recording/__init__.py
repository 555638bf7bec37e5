"""Records what becomes of real launches on a quiet machine: the rule for quiet, the plan, the rounds.

Imports the tuner's launcher and :mod:`benchmarks.recorded`, which plays records back.
``benchmarks.record_landscape`` is the command.
"""
