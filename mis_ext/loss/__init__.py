# SPDX-License-Identifier: Apache-2.0
"""The full policy loss: begin with :mod:`mis_ext.loss.policy`."""
