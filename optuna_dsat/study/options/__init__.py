"""Options of a search that its study stores: declaration, rules, and how they are read from a command line."""
