"""Pure functions over frozen Optuna trials: attributes, lineages, bisection state and optimistic bounds."""
