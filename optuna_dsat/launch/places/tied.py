"""``python -m optuna_dsat.launch.places.tied PID COMMAND...``: run COMMAND and end it when process PID ends.

The kernel sends SIGTERM once the thread that started this process ends, even if it was killed. Otherwise a request
that waits in a queue would outlive the process that made it.
"""

import os
import signal
import sys

from optuna_dsat.runtime.agent.processes import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), signal.SIGTERM)
    os.execvp(sys.argv[2], sys.argv[2:])
