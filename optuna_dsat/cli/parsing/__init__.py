"""From command-line arguments to the options of a command."""
