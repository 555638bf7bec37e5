"""Parse a training command: script, launcher, ranks and environment."""
