"""Reads and writes DeepSpeed configs: the batch triangle, the knobs, the search space over them.

Imports: errors, runtime.flattening. Called by: all folders that handle configurations.
"""
