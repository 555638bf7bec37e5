"""The command line as ``python -m optuna_dsat``, for environments whose scripts are not on the path."""

import sys

if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the working directory, whose modules may have names of installed ones
    from optuna_dsat.cli import main

    main()
