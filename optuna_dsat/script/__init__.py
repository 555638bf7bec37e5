"""Kinds of training scripts, and how each kind receives a configuration."""
