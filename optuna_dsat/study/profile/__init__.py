"""The profile launch: properties of the script, its model and its data."""
