"""Importance-sampling correction of the mismatch between inference and training engines in LLM RL.

Start reading at :mod:`mis_ext.correction`, the pipeline, or at :mod:`mis_ext.hosts.hook`, what the hosts call.
"""

from mis_ext.config import Band, CorrectionConfig, GateFactor, WeightFactor
from mis_ext.correction import Correction, compute_correction
from mis_ext.guards import MismatchWarning
from mis_ext.hosts.hook import compute_mis_weights, compute_mis_weights_with_cp
from mis_ext.layout import PackedLayout
from mis_ext.normalization import WeightScale
from mis_ext.presets import list_presets, load_config, preset

__all__ = [
    "Band",
    "Correction",
    "CorrectionConfig",
    "GateFactor",
    "MismatchWarning",
    "PackedLayout",
    "WeightFactor",
    "WeightScale",
    "compute_correction",
    "compute_mis_weights",
    "compute_mis_weights_with_cp",
    "list_presets",
    "load_config",
    "preset",
]
