"""What frozen Optuna trials say: their attributes, their lineages, and what each lineage can still become; pure.

Imports: Optuna, outcome. Called by: samplers, pruners, guided, store, study, report.
"""
