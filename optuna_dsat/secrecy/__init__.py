"""What must not be stored or shown: found by name and by shape, hidden, or kept as a reference to the environment.

Imports nothing of the rest. Whatever stores, logs or shows text of the user's or of the script's calls it; the runtime
of a rank resolves the references (``references.py``) right before the script runs.
"""
