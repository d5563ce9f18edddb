"""Published methods as coefficients of the policy gradient; start reading at :mod:`mis_ext.methods.method`."""

from mis_ext.methods.catalogue import METHODS, find_method
from mis_ext.methods.factors import Keep, RatioWeight
from mis_ext.methods.kl_terms import KlTerm
from mis_ext.methods.method import Method, MethodResult
from mis_ext.methods.pareto import ParetoWeight, smooth_weights
from mis_ext.methods.published import PublishedMethod
from mis_ext.methods.reductions import mean_weights
from mis_ext.methods.rejection_control import Accept
from mis_ext.methods.surrogates import Ratio, Score

__all__ = [
    "METHODS",
    "Accept",
    "Keep",
    "KlTerm",
    "Method",
    "MethodResult",
    "ParetoWeight",
    "PublishedMethod",
    "Ratio",
    "RatioWeight",
    "Score",
    "find_method",
    "mean_weights",
    "smooth_weights",
]
