"""The one door: options, what they come to, and the run. The command line and Python both come through here.

Imports: everything but cli. Called by: cli, the public names.
"""
