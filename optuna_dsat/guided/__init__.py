"""Models and planner of ``GuidedSampler``: candidates, posterior, acquisition function. No side effects.

Imports: config, trials, cost, metrics, outcome. Called by: samplers, study, report.
"""
