"""From options to a finished search; entry point of both the command line and Python."""
