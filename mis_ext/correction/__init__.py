# SPDX-License-Identifier: Apache-2.0
"""The correction: read :mod:`mis_ext.correction.passes` first, then :mod:`mis_ext.correction.correct`."""
