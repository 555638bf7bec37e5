"""Check whether this machine can run launches: capabilities, problems and remedies.

``examination`` runs all checks and returns ``finding.Finding`` objects. ``libraries`` queries torch and DeepSpeed in a
subprocess (``probe``), so that this process neither imports them nor initializes a device, and lists operators, usable
offloads and the launcher of a search; ``machine`` checks GPUs, memory, disks and compiler, and measures a drive.
"""
