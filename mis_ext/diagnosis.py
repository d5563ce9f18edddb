# SPDX-License-Identifier: Apache-2.0
"""One table of causes of a mismatch: the public path of :mod:`mis_ext.tools.diagnosis`."""

from mis_ext.tools.diagnosis import CAUSES, Cause, Diagnosis, Finding, Measured, Measuring, diagnose, search

__all__ = ["CAUSES", "Cause", "Diagnosis", "Finding", "Measured", "Measuring", "diagnose", "search"]
