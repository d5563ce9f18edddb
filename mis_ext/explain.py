# SPDX-License-Identifier: Apache-2.0
"""What a configuration does: the public path of :mod:`mis_ext.tools.explain`, whose modules load late here too."""

from typing import TYPE_CHECKING

from mis_ext.tools import explain as _room

if TYPE_CHECKING:
    from mis_ext.tools.explain import Circumstances as Circumstances
    from mis_ext.tools.explain import Effect as Effect
    from mis_ext.tools.explain import Explanation as Explanation
    from mis_ext.tools.explain import GaussianLaw as GaussianLaw
    from mis_ext.tools.explain import Trap as Trap
    from mis_ext.tools.explain import effect_of as effect_of
    from mis_ext.tools.explain import effect_of_method as effect_of_method
    from mis_ext.tools.explain import explain_config as explain_config
    from mis_ext.tools.explain import traps_of as traps_of
else:
    __getattr__, __dir__, __all__ = _room.__getattr__, _room.__dir__, _room.__all__
