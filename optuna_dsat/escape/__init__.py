"""Escape data from scripts, files and databases for display; a module per output format.

Imports: runtime.files. Called by: all that print, write notes and pages, or name files.
"""
