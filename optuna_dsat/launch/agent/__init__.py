"""A machine's side of a launch: write its files, start it, follow it and end it."""
