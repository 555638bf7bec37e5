"""A study from its spec to its result: profile, search, confirmation, storage and loading."""
