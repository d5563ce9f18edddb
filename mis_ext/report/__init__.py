# SPDX-License-Identifier: Apache-2.0
"""The mismatch report: the public path of :mod:`mis_ext.tools.report`."""

from mis_ext.tools.report import Collector, Mismatch, Origin, Outcome, Part, Parts, Summary, WhatIf, summarize

__all__ = ["Collector", "Mismatch", "Origin", "Outcome", "Part", "Parts", "Summary", "WhatIf", "summarize"]
