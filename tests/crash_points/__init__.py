"""A crash at every point: ``make crash-points``; the suite runs a sample drawn by a seed that it prints.

A study of each method, over simulated launches with a real process each, is run by the real command in a process of
its own, and every point is counted at which it writes to the database, creates, renames or removes a file, or starts
or ends a process. For each point the study is run again and something befalls it there: it is killed, the disk is
full, reads and writes fail, the database is locked or takes no writes any more, or the connection is cut. Then the
command goes on, and what must hold is checked.

The process is forked from one that has all imported. That is as good as one that was started: it is killed by the
kernel in the same way, at the same statement, and shares no connection, lock or thread with its parent, which has
none (that is checked); Python seeds its random numbers anew in a fork, and ids come from the system.

points: counts the points of a process, and lets something befall it at one of them.
launcher: simulated launches, each with a run directory and a marked process.
command: the command in a forked process, with points.
observed: what lies in the database, the folder and the machine afterwards.
checks: what must hold, as pure functions of what was observed.
runs: one study and its points; what befalls it, what is done then.
chosen: which of all blows are tried.
__main__: the command ``python -m tests.crash_points``.
"""
