"""What kind of script is tuned, and how a configuration reaches it.

Imports: config, errors, runtime, secrecy. Called by: launch, study, tuning, integrations.
"""
