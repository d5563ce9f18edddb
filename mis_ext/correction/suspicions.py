"""From where on log-probs are suspicious: the guards of a run and the audit of files draw the same lines."""

MIN_CONSTANT_TOKENS = 8
"""So many equal log-probs are no coincidence."""

MIN_SHIFT_TOKENS = 64
"""Pairs of neighbours that say whether streams are shifted against each other."""

SHIFT_FACTOR = 0.5
"""Streams that fit so much better when one is shifted by a token are misaligned."""

MAX_MEAN_ABS_DIFF = 0.3
"""Nats per token; more is no mismatch of kernels."""
