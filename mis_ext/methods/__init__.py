"""Published methods as coefficients of the policy gradient; start reading at :mod:`mis_ext.methods.method`."""

from typing import TYPE_CHECKING

from mis_ext.lazy import lazy_names

if TYPE_CHECKING:
    from mis_ext.methods.factors import Keep, Weight
    from mis_ext.methods.kl_terms import KlTerm
    from mis_ext.methods.method import Method, MethodResult
    from mis_ext.methods.preset import Preset
    from mis_ext.methods.presets import PRESETS, find_preset
    from mis_ext.methods.surrogates import Ratio, Score
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "factors": ("Keep", "Weight"),
            "kl_terms": ("KlTerm",),
            "method": ("Method", "MethodResult"),
            "preset": ("Preset",),
            "presets": ("PRESETS", "find_preset"),
            "surrogates": ("Ratio", "Score"),
        },
    )

__all__ = ["PRESETS", "Keep", "KlTerm", "Method", "MethodResult", "Preset", "Ratio", "Score", "Weight", "find_preset"]
