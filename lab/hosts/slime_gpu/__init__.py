# SPDX-License-Identifier: Apache-2.0
"""slime and Miles on one GPU with a small pretrained model: the model, the tasks, and training with a Ray of its own.

This folder is on the hosts' path as the package ``slime_gpu``: slime and Megatron-LM both have a package ``examples``
of their own, so nothing may be imported as ``examples.*`` in their processes.
"""
