"""Machines drawn at random, for searches that were not made beside them.

``forms`` has the shapes that a cost may take, ``draw`` throws the dice, ``machine`` answers launches, ``__main__`` runs
searches over a range of seeds. Nothing here imports the tuner's own cost models (a test checks that), and at least
30 % of what decides a machine's times and memory has a form that those models lack.
"""
