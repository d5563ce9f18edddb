# SPDX-License-Identifier: Apache-2.0
"""Published methods as coefficients of the policy gradient; start reading at :mod:`mis_ext.methods.method`."""

from mis_ext.methods.catalogue import METHODS, find_method
from mis_ext.methods.method import Method, MethodResult
from mis_ext.methods.parts import KlTerm, PairGate, PairWeight, Ratio, Score
from mis_ext.methods.published import PublishedMethod
from mis_ext.methods.reinforce import expected_score
from mis_ext.methods.sequence_weights import ParetoWeight, smooth_weights

__all__ = [
    "METHODS",
    "KlTerm",
    "Method",
    "MethodResult",
    "PairGate",
    "PairWeight",
    "ParetoWeight",
    "PublishedMethod",
    "Ratio",
    "Score",
    "expected_score",
    "find_method",
    "smooth_weights",
]
