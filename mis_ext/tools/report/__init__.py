# SPDX-License-Identifier: Apache-2.0
"""The mismatch report: where trainer and engine differ, and the effect of each configuration.

The input is parts of a run, from dumps (:class:`Parts`) or from tensors (:meth:`Part.of_lists`). A :class:`Collector`
keeps their sums and computes the typed :class:`Summary`. This needs only torch; the page needs ``mis_ext[report]``.
"""

from mis_ext.tools.diagnosis.evidence import Origin
from mis_ext.tools.report.findings import Collector, summarize
from mis_ext.tools.report.part import Part, Parts
from mis_ext.tools.report.summary import Mismatch, Summary
from mis_ext.tools.report.what_if import Outcome, WhatIf

__all__ = ["Collector", "Mismatch", "Origin", "Outcome", "Part", "Parts", "Summary", "WhatIf", "summarize"]
