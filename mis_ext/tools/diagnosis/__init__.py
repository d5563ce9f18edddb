# SPDX-License-Identifier: Apache-2.0
"""One table of causes of a mismatch: the guards of a run, the report and the audit ask it.

:class:`Measuring` adds up what tokens show, :func:`diagnose` names the causes in ``CAUSES`` that it points to, each
with the share of k3 that it explains.
"""

from mis_ext.tools.diagnosis.cause import Cause, Diagnosis, Finding
from mis_ext.tools.diagnosis.measuring import Measured, Measuring
from mis_ext.tools.diagnosis.table import CAUSES, diagnose, search

__all__ = ["CAUSES", "Cause", "Diagnosis", "Finding", "Measured", "Measuring", "diagnose", "search"]
