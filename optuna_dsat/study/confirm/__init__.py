"""Confirmation: finalists and baseline measured again in rounds, and the verdict."""
