"""What a configuration does: in words and formulas, by the Gaussian law of a mismatch, and with its known traps.

:func:`explain_config` says everything at once. It needs nothing but torch.
"""

from typing import TYPE_CHECKING

from mis_ext.lazy import lazy_names

if TYPE_CHECKING:
    from mis_ext.tools.explain.effect import Effect, effect_of, effect_of_method
    from mis_ext.tools.explain.law import GaussianLaw
    from mis_ext.tools.explain.traps import Circumstances, Trap, traps_of
    from mis_ext.tools.explain.words import Explanation, explain_config
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "words": ("Explanation", "explain_config"),
            "effect": ("Effect", "effect_of", "effect_of_method"),
            "law": ("GaussianLaw",),
            "traps": ("Circumstances", "Trap", "traps_of"),
        },
    )

__all__ = [
    "Circumstances",
    "Effect",
    "Explanation",
    "GaussianLaw",
    "Trap",
    "effect_of",
    "effect_of_method",
    "explain_config",
    "traps_of",
]
