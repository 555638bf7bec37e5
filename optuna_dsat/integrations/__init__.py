"""Helpers for scripts that want to take part; none of them is needed to be tuned."""
