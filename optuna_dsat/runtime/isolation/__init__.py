"""Keep the user's files as they are: overlays, and redirected writes where no overlay can be mounted."""
