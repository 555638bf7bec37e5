"""Machines of an allocation: SLURM and Ray."""
