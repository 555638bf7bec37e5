"""User interface of a running search: lines, the live view, Ctrl-C."""
