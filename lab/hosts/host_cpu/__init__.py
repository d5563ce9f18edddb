# SPDX-License-Identifier: Apache-2.0
"""slime and Miles, unmodified, on a CPU: what stands for a GPU, inputs, runs, and the comparison of what they logged.

The folder above is on the hosts' path, so that this is the package ``host_cpu``: slime, Miles and Megatron-LM may have
a package ``examples`` of their own, so nothing may be imported as ``examples.*`` in their processes.
"""
