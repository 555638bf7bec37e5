"""What a command launches: script, launcher, ranks and environment."""
