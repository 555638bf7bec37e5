"""Escape data from scripts, files and databases for display; a module per output format."""
