# SPDX-License-Identifier: Apache-2.0
"""One table of causes of a mismatch: the report and the audit ask it.

:class:`Gathering` keeps tokens, :func:`diagnose` names the causes in ``CAUSES`` that they point to, each with the share
of k3 that it explains. Begin with ``table.py``; ``thresholds.py`` has every number.
"""

from mis_ext.tools.diagnosis.cause import Cause, Diagnosis
from mis_ext.tools.diagnosis.evidence import Evidence, Gathering
from mis_ext.tools.diagnosis.table import CAUSES, diagnose, search

__all__ = ["CAUSES", "Cause", "Diagnosis", "Evidence", "Gathering", "diagnose", "search"]
