"""Pure functions over frozen Optuna trials: attributes, lineages, bisection state and optimistic bounds.

Imports: Optuna, config, outcome. Called by: samplers, pruners, guided, store, study, report.
"""
