"""Protect the user's files from changes: overlays, or redirected writes where overlays cannot be mounted."""
