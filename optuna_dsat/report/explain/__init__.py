"""Why the result is what it is: contributions of settings, predictions, proposals."""
