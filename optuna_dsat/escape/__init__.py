"""How data is shown: one module a medium, through which whatever comes from scripts, files and databases passes.

Imports: runtime.plain_text. Called by: all that print, write notes and pages, or name files.
"""
