"""A launch before its ranks start: torchrun, and the process that warm launches are forked from."""
