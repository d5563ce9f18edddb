# SPDX-License-Identifier: Apache-2.0
"""The full policy loss: start reading at :mod:`mis_ext.loss.policy`."""
