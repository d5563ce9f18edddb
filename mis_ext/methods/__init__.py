"""Published methods as coefficients of the policy gradient; start reading at :mod:`mis_ext.methods.method`."""

from mis_ext.methods.denominators import mean_weights
from mis_ext.methods.factors import Keep, Weight
from mis_ext.methods.kl_terms import KlTerm
from mis_ext.methods.method import Method, MethodResult
from mis_ext.methods.pareto import ParetoWeight, smooth_weights
from mis_ext.methods.preset import Preset
from mis_ext.methods.presets import PRESETS, find_preset
from mis_ext.methods.rejection_control import Accept
from mis_ext.methods.surrogates import Ratio, Score

__all__ = [
    "PRESETS",
    "Accept",
    "Keep",
    "KlTerm",
    "Method",
    "MethodResult",
    "ParetoWeight",
    "Preset",
    "Ratio",
    "Score",
    "Weight",
    "find_preset",
    "mean_weights",
    "smooth_weights",
]
