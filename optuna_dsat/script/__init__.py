"""Kinds of training scripts, and how each kind receives a configuration.

Imports: config, errors, runtime, secrecy. Called by: launch, study, tuning, integrations.
"""
