# SPDX-License-Identifier: Apache-2.0
"""The table of causes of a mismatch, which the report and the audit use.

:class:`Gathering` collects tokens. :func:`diagnose` returns the causes in ``CAUSES`` which match them, each with the
share of k3 that it explains. Start with ``table.py``; ``thresholds.py`` has all limits.
"""

from mis_ext.tools.diagnosis.cause import Cause, Diagnosis
from mis_ext.tools.diagnosis.evidence import Evidence, Gathering
from mis_ext.tools.diagnosis.table import CAUSES, diagnose, search

__all__ = ["CAUSES", "Cause", "Diagnosis", "Evidence", "Gathering", "diagnose", "search"]
