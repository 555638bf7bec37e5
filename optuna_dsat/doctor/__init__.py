"""Check whether this machine can run launches: capabilities, problems and remedies.

``examination`` runs all checks and returns ``finding.Finding`` objects. ``libraries`` queries torch and DeepSpeed in a
subprocess (``probe``), so that this process neither imports them nor initializes a device; ``machine`` checks GPUs,
memory, disks and compiler; ``nvme`` measures a drive; ``offloads`` lists usable offloads; ``launchers`` determines the
launcher of a search; ``storage`` checks whether a study's database can be opened.

May import ``launch`` and ``store``; used by ``cli``.
"""
