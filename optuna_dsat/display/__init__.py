"""User interface of a running search: lines, the live view, Ctrl-C.

Imports: outcome, words, study.progress. Called by: tuning, cli.
"""
