"""A training program that is a package."""
