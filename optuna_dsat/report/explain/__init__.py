"""Explanation of the result: contributions of settings, predictions."""
