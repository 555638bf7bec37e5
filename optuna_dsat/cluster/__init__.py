"""Launches on machines of a cluster: places held through SLURM or Ray, with an agent on each node.

Imports: errors, outcome, words, secrecy, config, runtime, script, launch. Called by: doctor, tuning, cli.
"""
