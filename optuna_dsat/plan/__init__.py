"""Predict memory and speed without a search, from a model's shape or from a profile.

Imports: config, cost, launch, store, study. Called by: cli.
"""
