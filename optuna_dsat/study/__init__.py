"""A study from its spec to its result: profile, search, confirmation, storage and loading.

Imports: everything but report, plan, display, tuning and cli. Called by: report, plan, display, tuning, cli.
"""
