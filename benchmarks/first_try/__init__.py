"""Public DeepSpeed scripts, each tuned by the command that its own README gives.

``scripts/`` lists them, ``sources`` fetches them, ``ways`` runs the three ways of tuning, ``judge`` says what became of
each, ``page`` draws the table; ``stand_ins/`` takes the place of data, weights and devices that are not at hand.
"""
