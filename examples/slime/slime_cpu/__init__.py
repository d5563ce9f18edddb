"""slime, unmodified, on a CPU: what stands for a GPU, inputs, runs, and the comparison of what slime logged.

This folder is on slime's path as the package ``slime_cpu``: slime and Megatron-LM both have a package ``examples`` of
their own, so nothing may be imported as ``examples.*`` in their processes.
"""
