"""The profile launch: what the script, its model and its data are."""
