"""From where on log-probs are suspicious: limits that several rules share."""

MIN_TOKENS = 64
"""Fewer tokens, or pairs of neighbours, say too little about sizes, lines and shifts."""

MIN_CONSTANT_TOKENS = 8
"""So many equal log-probs are no coincidence."""

SHIFT_FACTOR = 0.5
"""Streams that fit so much better when one is shifted by a token are misaligned."""

MAX_MEAN_ABS_DIFF = 0.3
"""Nats per token; more is no mismatch of kernels."""

MAX_CONSTANT_SPREAD = 0.1
"""Nats. Equal behavior log-probs are legitimate where the proximal ones hardly vary: one-token answers, uniform
policies. They are not where the proximal ones vary as those of different tokens do."""

IMPROBABLE = -1.0
"""Nats. What the other side finds less probable had no probability of 1, unless a cut left it alone."""

ZEROS_OF_A_CUT = 0.5
"""Log-probs of 0 in place of others do not depend on the token: the other side finds them less probable than is typical
of the response's tokens as often as the rest, 1 times. A token to which a cut left no alternative was the most probable
one: with top-p it has at least that probability, and no other token has as much, so that none of them is less probable
than the rest, 0 times. This is halfway, for logits of any kind and vocabulary."""

MANY_POSITIVE = 0.5
"""Share of a response's tokens above 0 from which on all of them are wrong: something was added to each."""

PLACEHOLDER = -1000.0
"""Nats. No model gives a token that it sampled a log-prob like this; -9999, -1e9 and the lowest floats are below it in
every dtype."""

MAX_LOG_PROB = 0.1
"""Nats. Where the log-sum-exp is rounded to bfloat16, the log-prob of a certain token may be above 0, but by less."""

CERTAIN = 0.98
"""Where the engine's probability is above, a token says little about the engines: both give 1."""

KERNEL_K3, PRETRAINED_K3, QUANTISED_K3 = 1e-3, 3e-3, 7e-2
"""Up to where a k3 per token is explained by kernels in bfloat16 of our small models, by those of SmolLM2-135M (1.7e-3
to 2.2e-3), and by low precision there (1.4e-2 to 7e-2 while a policy learns). They are no limits of other models:
Qwen2.5-Coder-1.5B has 2e-4 and 0.3. So they choose which of several words for a size comes first, and the others are
among its alternatives. Where differences are normal, a k3 of 7e-2 has a mean difference of ``MAX_MEAN_ABS_DIFF``."""

SAMPLED_ERRORS = 3.0
"""The mean of p / q over tokens that q sampled is 1, or less where few ratios have much of it, and never more: above by
so many standard errors, they were sampled from something else."""

BASES = tuple((side, base) for side in ("engine", "trainer") for base in (2.0, 10.0))
"""Of logarithms, and whose they may be."""

MAX_CHANCE = 1e-3
"""What has a smaller chance is no coincidence."""

FEW_SEQUENCES_ESS = 0.2
"""Effective share of products of ratios below which a few responses decide.

By the Gaussian law it is exp(-s^2), with s the standard deviation of the log of a product, and the heaviest Phi(-s) of
the responses have half of all weight: a tenth of them at 0.19, a fifth at 0.5, one in fifteen at 0.1.
"""

SUSPICIOUS_LINE = 0.05
"""Share of the variance of differences that a line in one side's log-probs explains: below, no rule looks at it."""
