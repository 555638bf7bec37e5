"""A single machine: GPUs and their owners, host memory, processes, operators, and the clean-up journal."""
