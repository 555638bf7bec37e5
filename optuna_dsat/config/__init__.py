"""Read and write DeepSpeed configs: batch sizes, knobs, search spaces.

Imports: errors, runtime.flattening. Called by: all folders that handle configurations.
"""
