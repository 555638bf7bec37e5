"""Cost models of a configuration: memory of device and host, step time, data sheets of GPUs.

Imports: config, errors, runtime.events. Called by: guided, study, plan, report.
"""
