"""The command line as ``python -m optuna_dsat``, for environments whose scripts are not on the path."""

from optuna_dsat.cli import main

if __name__ == "__main__":
    main()
