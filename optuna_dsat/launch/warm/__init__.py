"""Launches forked from a process that has done the script's imports."""
