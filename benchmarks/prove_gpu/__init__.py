"""Proves the CUDA path on a machine that has a GPU, part by part: ``python -m benchmarks.prove_gpu``."""
