# SPDX-License-Identifier: Apache-2.0
"""Explanation of a configuration: its steps, its effect in the Gaussian approximation, and warnings."""

from typing import TYPE_CHECKING

from mis_ext.lazy import lazy_names

if TYPE_CHECKING:
    from mis_ext.tools.explain.effect import Effect as Effect
    from mis_ext.tools.explain.effect import GaussianLaw as GaussianLaw
    from mis_ext.tools.explain.effect import effect_of as effect_of
    from mis_ext.tools.explain.traps import Circumstances as Circumstances
    from mis_ext.tools.explain.traps import Trap as Trap
    from mis_ext.tools.explain.traps import traps_of as traps_of
    from mis_ext.tools.explain.words import Explanation as Explanation
    from mis_ext.tools.explain.words import explain_config as explain_config
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
