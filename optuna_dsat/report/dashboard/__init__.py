"""Notes, plots and files for optuna-dashboard, and the live page."""
