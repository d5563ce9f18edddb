# SPDX-License-Identifier: Apache-2.0
"""The correction: read :mod:`mis_ext.correction.correct` from top to bottom."""
