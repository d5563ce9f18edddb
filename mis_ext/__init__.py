# SPDX-License-Identifier: Apache-2.0
"""Importance-sampling correction of the mismatch between inference and training engines in LLM RL.

To read the code, start at :mod:`mis_ext.correction.correct`. slime, vime, and Miles call
:mod:`mis_ext.hosts.slime_miles.hook`.
"""

from typing import TYPE_CHECKING

from mis_ext.lazy import lazy_names

__version__ = "0.6.0"

if TYPE_CHECKING:
    from mis_ext.correction.config import BOUNDS as BOUNDS
    from mis_ext.correction.config import CorrectionConfig as CorrectionConfig
    from mis_ext.correction.config import Gate as Gate
    from mis_ext.correction.config import Weight as Weight
    from mis_ext.correction.correct import Correction as Correction
    from mis_ext.correction.correct import compute_correction as compute_correction
    from mis_ext.correction.layout import PackedLayout as PackedLayout
    from mis_ext.correction.layout import PackedStreams as PackedStreams
    from mis_ext.correction.metrics import GroupNumber as GroupNumber
    from mis_ext.correction.metrics import Mean as Mean
    from mis_ext.correction.tokens import STATISTICS as STATISTICS
    from mis_ext.files import list_presets as list_presets
    from mis_ext.hosts.groups import Groups as Groups
    from mis_ext.hosts.megatron import hand_over_hidden_states as hand_over_hidden_states
    from mis_ext.hosts.megatron import make_loss_func as make_loss_func
    from mis_ext.hosts.own_trainer import compute_mis_weights as compute_mis_weights
    from mis_ext.hosts.own_trainer import correct_padded as correct_padded
    from mis_ext.hosts.own_trainer import scalars as scalars
    from mis_ext.hosts.session import Session as Session
    from mis_ext.hosts.session import session_for as session_for
    from mis_ext.hosts.slime_miles.check_setup import check_setup as check_setup
    from mis_ext.hosts.slime_miles.hook import compute_mis_weights_with_cp as compute_mis_weights_with_cp
    from mis_ext.hosts.slime_miles.policy_loss import model_provider as model_provider
    from mis_ext.hosts.slime_miles.policy_loss import policy_loss as policy_loss
    from mis_ext.hosts.slime_miles.rollout import group_rewards as group_rewards
    from mis_ext.hosts.slime_miles.rollout import prepare_rollout as prepare_rollout
    from mis_ext.hosts.whole_loss import TotalLoss as TotalLoss
    from mis_ext.hosts.whole_loss import policy_loss_from_hidden as policy_loss_from_hidden
    from mis_ext.hosts.whole_loss import policy_loss_from_log_probs as policy_loss_from_log_probs
    from mis_ext.keys.reading import config_from_mapping as config_from_mapping
    from mis_ext.keys.reading import load_config as load_config
    from mis_ext.keys.reading import preset as preset
    from mis_ext.loss.groups import group_advantages as group_advantages
    from mis_ext.scoring.hidden import score_hidden as score_hidden
    from mis_ext.scoring.passes import KeptColumns as KeptColumns
    from mis_ext.scoring.scores import score_tokens as score_tokens
    from mis_ext.tools.report.online import log_mismatch as log_mismatch
    from mis_ext.validation import MismatchWarning as MismatchWarning
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__)
