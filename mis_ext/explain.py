"""What a configuration does: the public path of :mod:`mis_ext.tools.explain`, whose modules load late here too."""

from typing import TYPE_CHECKING

from mis_ext.tools import explain as _room

if TYPE_CHECKING:
    from mis_ext.tools.explain import (
        Circumstances,
        Effect,
        Explanation,
        GaussianLaw,
        Trap,
        effect_of,
        effect_of_method,
        explain_config,
        traps_of,
    )
else:
    __getattr__, __dir__ = _room.__getattr__, _room.__dir__

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
