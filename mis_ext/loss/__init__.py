# SPDX-License-Identifier: Apache-2.0
"""The whole policy loss: read :mod:`mis_ext.loss.naive` first, then :mod:`mis_ext.loss.policy`."""
