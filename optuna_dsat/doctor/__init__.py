"""What this machine offers a search, what is wrong with it, and what to do about it.

``examination`` looks at everything and gives ``finding.Finding`` s; ``libraries`` asks torch and DeepSpeed in a process
of their own, so that this one neither imports them nor touches a device; ``machine`` looks at GPUs, memory and disks,
``nvme`` measures one, ``offloads`` says which offloads can work, ``launchers`` which launcher is used, ``database``
whether a storage can be reached.
"""
