"""What a configuration costs without running it: memory by place and stage, seconds of a step, data sheets of GPUs.

Imports: config, errors, runtime.events. Called by: guided, study, plan, report.
"""
