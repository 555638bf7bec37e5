"""Optional helpers for scripts: Hugging Face Trainer and Determined's ``DeepSpeedTrial`` API.

Imports the runtime and, for model definitions, ``script.trial_class``; user scripts import it.
"""
