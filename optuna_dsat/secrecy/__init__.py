"""Detect secrets by name and shape, and hide them or replace them by references to the environment.

Imports no other folder. Called by all code that stores, logs or shows text of the user or of the script; the runtime of
a rank resolves the references (``references.py``) right before the script runs.
"""
