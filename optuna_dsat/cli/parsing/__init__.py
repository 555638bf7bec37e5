"""From words on the command line to the options of a command."""
