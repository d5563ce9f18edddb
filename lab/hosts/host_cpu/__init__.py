# SPDX-License-Identifier: Apache-2.0
"""Unmodified slime and Miles on a CPU: the GPU replacement, inputs, runs, and the comparison of their logs.

The folder above is on the hosts' path, so that this is the package ``host_cpu``: slime, Miles and Megatron-LM may have
a package ``examples`` of their own, so nothing may be imported as ``examples.*`` in their processes.
"""
