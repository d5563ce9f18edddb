# SPDX-License-Identifier: Apache-2.0
"""Log-probs, entropy, and their gradient from logits: read :mod:`mis_ext.scoring.scores` first.

From hidden states, without logits: :mod:`mis_ext.scoring.hidden`.

There are two implementations: :mod:`mis_ext.scoring.chunked`, and fused :mod:`mis_ext.scoring.triton_backend`.
"""

from mis_ext.scoring.hidden import score_hidden
from mis_ext.scoring.passes import KeptColumns
from mis_ext.scoring.scores import EntropyUse, Scores, score_tokens

__all__ = ["EntropyUse", "KeptColumns", "Scores", "score_hidden", "score_tokens"]
