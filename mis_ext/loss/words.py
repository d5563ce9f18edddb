# SPDX-License-Identifier: Apache-2.0
"""The words for keys and flags of a full policy loss, in a separate module, so that the hook loads no loss."""

from typing import Literal

Mode = Literal["baseline", "decoupled", "bypass", "reinforce"]
KlType = Literal["k1", "k2", "k3", "low_var_kl"]
LossDenominator = Literal["original", "kept", "sequence", "constant"]
PenaltyTokens = Literal["kept", "all"]
Proximal = Literal["stored", "current"]
Scoring = Literal["fused", "host"]
EPS_CLIP = 0.2
"""The default clip of the frameworks."""
