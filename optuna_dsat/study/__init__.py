"""One study from its spec to its result: profile, search, confirmation, what is stored and read back.

Imports: everything but report, plan, display, tuning and cli. Called by: report, plan, display, tuning, cli.
"""
