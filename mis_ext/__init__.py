"""Importance-sampling correction of the mismatch between inference and training engines in LLM RL.

To read the code, start at :mod:`mis_ext.correction.pipeline`. The hosts call :mod:`mis_ext.hosts.slime_miles.hook`.
"""

from typing import TYPE_CHECKING

from mis_ext.lazy import lazy_names

__version__ = "0.3.0"

if TYPE_CHECKING:
    from mis_ext.correction.config import CorrectionConfig
    from mis_ext.correction.gates import Gate
    from mis_ext.correction.layout import PackedLayout
    from mis_ext.correction.metrics import GroupNumber, Mean
    from mis_ext.correction.normalization import WeightScale
    from mis_ext.correction.pipeline import Correction, compute_correction
    from mis_ext.correction.statistics import STATISTICS
    from mis_ext.correction.weights import BOUNDS, Weight
    from mis_ext.hosts.groups import Groups
    from mis_ext.hosts.guards import MismatchWarning
    from mis_ext.hosts.master_weights import dither_master_weights, dither_weights
    from mis_ext.hosts.megatron import make_loss_func
    from mis_ext.hosts.own_trainer import compute_mis_weights, correct_padded, scalars
    from mis_ext.hosts.packing import PackedStreams
    from mis_ext.hosts.runs import session_for
    from mis_ext.hosts.session import Session
    from mis_ext.hosts.slime_miles.check_setup import check_setup
    from mis_ext.hosts.slime_miles.hook import compute_mis_weights_with_cp
    from mis_ext.hosts.slime_miles.policy_loss import policy_loss
    from mis_ext.hosts.slime_miles.rollout import prepare_rollout
    from mis_ext.hosts.whole_loss import TotalLoss, policy_loss_from_log_probs
    from mis_ext.keys.flat import config_from_mapping
    from mis_ext.keys.preset_files import list_presets
    from mis_ext.keys.presets import load_config, preset
    from mis_ext.scoring.passes import KeptColumns
    from mis_ext.scoring.scores import score_tokens
    from mis_ext.tools.report.online import log_mismatch
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "correction.config": ("CorrectionConfig",),
            "correction.gates": ("Gate",),
            "correction.layout": ("PackedLayout",),
            "correction.metrics": ("GroupNumber", "Mean"),
            "correction.normalization": ("WeightScale",),
            "correction.pipeline": ("Correction", "compute_correction"),
            "correction.statistics": ("STATISTICS",),
            "correction.weights": ("BOUNDS", "Weight"),
            "hosts.groups": ("Groups",),
            "hosts.guards": ("MismatchWarning",),
            "hosts.whole_loss": ("TotalLoss", "policy_loss_from_log_probs"),
            "hosts.packing": ("PackedStreams",),
            "hosts.master_weights": ("dither_master_weights", "dither_weights"),
            "hosts.megatron": ("make_loss_func",),
            "hosts.own_trainer": ("compute_mis_weights", "correct_padded", "scalars"),
            "hosts.session": ("Session",),
            "hosts.slime_miles.check_setup": ("check_setup",),
            "keys.flat": ("config_from_mapping",),
            "hosts.slime_miles.hook": ("compute_mis_weights_with_cp",),
            "hosts.slime_miles.policy_loss": ("policy_loss",),
            "hosts.slime_miles.rollout": ("prepare_rollout",),
            "hosts.runs": ("session_for",),
            "keys.preset_files": ("list_presets",),
            "keys.presets": ("load_config", "preset"),
            "tools.report.online": ("log_mismatch",),
            "scoring.passes": ("KeptColumns",),
            "scoring.scores": ("score_tokens",),
        },
    )

__all__ = [
    "BOUNDS",
    "STATISTICS",
    "Correction",
    "CorrectionConfig",
    "Gate",
    "GroupNumber",
    "Groups",
    "KeptColumns",
    "Mean",
    "MismatchWarning",
    "PackedLayout",
    "PackedStreams",
    "Session",
    "TotalLoss",
    "Weight",
    "WeightScale",
    "check_setup",
    "compute_correction",
    "compute_mis_weights",
    "compute_mis_weights_with_cp",
    "config_from_mapping",
    "correct_padded",
    "dither_master_weights",
    "dither_weights",
    "list_presets",
    "load_config",
    "log_mismatch",
    "make_loss_func",
    "policy_loss",
    "policy_loss_from_log_probs",
    "prepare_rollout",
    "preset",
    "scalars",
    "score_tokens",
    "session_for",
]
