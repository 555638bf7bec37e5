"""The slots for launches: this machine's, or nodes of SLURM and Ray."""
