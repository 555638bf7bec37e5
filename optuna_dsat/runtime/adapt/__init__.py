"""Apply a trial's settings to a script's trainers, data loaders, options, ranks and side effects."""
