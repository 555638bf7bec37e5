"""Options of a search: declared once, read from the command line, from Python and from files."""
