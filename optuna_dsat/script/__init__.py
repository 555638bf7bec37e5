"""Kinds of training scripts, and how each one receives a configuration.

Imports: config, errors, runtime, secrecy. Called by: launch, study, tuning, integrations.
"""
