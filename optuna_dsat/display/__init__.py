"""What a person sees while a search runs: lines, the live view, Ctrl-C.

Imports: outcome, words, study.progress. Called by: tuning, cli.
"""
