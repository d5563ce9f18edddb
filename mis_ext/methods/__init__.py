# SPDX-License-Identifier: Apache-2.0
"""Published methods as coefficients of the policy gradient; start reading at :mod:`mis_ext.methods.method`."""

from mis_ext.methods.batch import mean_weights
from mis_ext.methods.catalogue import METHODS, find_method
from mis_ext.methods.method import Method, MethodResult
from mis_ext.methods.parts import KlTerm, Ratio, RatioWeight, Score
from mis_ext.methods.published import PublishedMethod
from mis_ext.methods.reinforce import expected_score
from mis_ext.methods.sequence_weights import Accept, ParetoWeight, smooth_weights

__all__ = [
    "METHODS",
    "Accept",
    "KlTerm",
    "Method",
    "MethodResult",
    "ParetoWeight",
    "PublishedMethod",
    "Ratio",
    "RatioWeight",
    "Score",
    "expected_score",
    "find_method",
    "mean_weights",
    "smooth_weights",
]
