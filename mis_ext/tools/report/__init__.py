# SPDX-License-Identifier: Apache-2.0
"""The mismatch report: where two engines disagree, and what each configuration would have done about it.

Parts of a run go in (:class:`Parts` makes them of dumps, :meth:`Part.of_lists` of tensors); a :class:`Collector` keeps
sums of them, of which the typed :class:`Summary` is computed. It needs nothing but torch; the page needs
``mis_ext[report]``.
"""

from mis_ext.tools.diagnosis.evidence import Origin
from mis_ext.tools.report.findings import Collector, summarize
from mis_ext.tools.report.part import Part, Parts
from mis_ext.tools.report.summary import Mismatch, Summary
from mis_ext.tools.report.what_if import Outcome, WhatIf

__all__ = ["Collector", "Mismatch", "Origin", "Outcome", "Part", "Parts", "Summary", "WhatIf", "summarize"]
