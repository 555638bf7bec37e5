"""Apply a trial's settings to what a script uses: trainers, data loaders, options, ranks, side effects."""
