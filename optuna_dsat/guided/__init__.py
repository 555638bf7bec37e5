"""The models and the planner behind ``GuidedSampler``: candidates, posterior, acquisition; pure.

Imports: config, trials, cost, metrics, outcome. Called by: samplers, study, report.
"""
