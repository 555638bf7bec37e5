"""A machine's part of a launch: write its files, start it, follow it and end it."""
