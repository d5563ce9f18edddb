# SPDX-License-Identifier: Apache-2.0
"""All thresholds of the diagnosis. Each follows from geometry or from chance, unless its text gives data."""

import math

# --- chance

MIN_TOKENS = 64
"""The least number of tokens, or of neighboring pairs, to measure sizes, lines and shifts."""
MIN_SAMPLES = 16
"""The least number of responses to form two groups."""
MAX_CHANCE = 1e-3
"""A smaller probability is not a coincidence."""
SAMPLED_ERRORS = 3.0
"""Standard errors. The mean of p / q over tokens sampled from q is 1, or less if a few ratios dominate it."""
PLACE_ERRORS, STEP_ERRORS = 6.0, 3.0
"""Standard errors between two places of a response; between two steps or two weight versions."""

# --- how much must be explained

MIN_K3_SHARE = 0.1
"""A smaller share of k3 in less than a hundredth of the tokens is never certain and never the headline."""
MAIN_SHARE = 0.5
"""Share of k3. If a cause explains this share, no tail or place is named."""
SHAPE_OF_CHANGE = 0.8
"""Share of k3. If k3 changes over steps, a place or a tail must have this share; else it only shows the change most."""
MAX_EXPLAINED = 0.87
"""If other causes explain more of k3, the rest is not classified, because shares are not that exact."""
MAX_EXPLAINED_OF_WEIGHTS = 0.3
"""If other causes explain more of k3, the size of the rest is no evidence about weights."""

# --- placeholders and log-probs that are none

MIN_CONSTANT_TOKENS, MIN_PLACEHOLDERS = 8, 2
"""This many equal log-probs are not a coincidence; one extreme token is not a pattern."""
PLACEHOLDER, MAX_LOG_PROB = -1000.0, 0.1
"""Nats. No model gives a sampled token less in any dtype; rounding the log-sum-exp to bfloat16 gives at most 0.1."""
IMPROBABLE, CERTAIN, NEARLY_CERTAIN = -1.0, 0.98, 0.999
"""Nats: below it on the other side, a token cannot have probability 1. Then two probabilities: above the first a token
says little about engines; above the second two log-probs may be equal by saturation alone.
"""
ZEROS_OF_A_CUT = 0.5
"""Placeholder zeros are improbable on the other side as often as other tokens (ratio 1). Zeros from truncated sampling,
of tokens without an alternative, never are (ratio 0). This is halfway.
"""
MAX_FAR = 0.4
"""Up to this share of tokens in responses with another text, their zeros are attributed to that text."""
ZEROS_OF_A_PLACE, ZEROS_ELSEWHERE = 0.25, 0.25
"""If this share of log-probs at one place is 0, they are placeholders, unless similar tokens elsewhere are 0 at this
fraction of the rate. (Responses that end at a length limit have no end token.)
"""
MAX_ZERO_GAP = 0.01
"""Nats. Behavior log-probs that are all 0 are valid only if the trainer is equally certain."""
MAX_CONSTANT_SPREAD, MAX_MEAN_ABS_DIFF = 0.1, 0.3
"""Nats. Constants are valid if the other side varies less. A larger mean difference did not come from kernels in any
model of the lab (at most 0.1).
"""
SUSPICIOUS_SHARE, ZERO_SHARE, MANY_POSITIVE = 0.01, 0.05, 0.5
"""Shares of tokens. Above the first, an error is a pattern; above the second, zeros are one (a 0 may be a token without
an alternative); above the third, all tokens of a response are wrong, because most are above 0.
"""
BASE_FACTOR, EXACT = 2.0 / 3.0, 0.45
"""The largest share of the mean distance of differences from their median that remains after converting the base: if
the mean ratio becomes 1, and if it does not, so that the remainder is noise.
"""

# --- shifted

LAGS = (1, 2, 3)
"""Tokens by which one side may be shifted."""
SHIFT_FACTOR, MIN_SHIFTED_TOKENS, MIN_SHIFTED_DIFF = 0.5, 8, 0.1
"""Log-probs are misaligned if a shift reduces the difference by the first factor. For single responses, at least the
second number of tokens, half of them in each half, must differ by the third number of nats.
"""

# --- groups of responses

GROUP_FACTOR, MIN_GROUP_SIZE = 3.0, 3
"""Two groups differ by this factor in ``|d| / (1 - p)``; the least number of responses in the smaller group."""
MAX_BETWEEN, GROUP_SPREAD = 0.2, 0.05
"""The largest number of responses in the middle third between both medians, as a share of the smaller group. The least
standard deviation of a group, in log units, because a response is itself a sample.
"""
TELLS_APART, MAX_PERIOD = 0.9, 20
"""The least balanced accuracy of an attribute that separates two groups; the longest period of a row of responses."""
MIN_STILL, MIN_ROOM, MOVED_FACTOR = 0.5, 1e-6, 5.0
"""Another text is equally frequent where weights have not changed; with chance, at least half as frequent. A sample
with a mean 1 - p below the second is rounded too much. Weights have changed in steps that differ by the third factor
(at most 2.5 in 36 runs with up-to-date weights; 13 and more where an update changed a nearly certain policy).
"""
MAX_STALE_DIFF = 1.0
"""Nats per token, if the trainer finds most open tokens more probable: another text differs more. (Weights that were
stale by eight updates moved 1 % of the samples of SmolLM2 farther.)
"""

# --- steps and versions

GROWTH, TYPICAL_GROWTH, NOTICED = 3.0, 1.4, 1.5
"""k3 has grown if it is the first factor times that of the first steps, and typical differences are the second factor
times as large. A change by the third factor is reported with a size.
"""
MIN_GROWING, RISING = 3, 0.75
"""The least number of steps, and the least share of steps with a rise, of a growth that is not a jump."""
QUIET_K3 = 2e-4
"""A k3 below this may fluctuate, and is not named in addition to a main cause."""
MIN_OPEN, RAISED, RAISED_ERRORS = 200, 0.55, 4.0
"""The trainer has newer weights if it finds this share of at least this many open tokens more probable, by this many
standard errors above one half. 121 measurements with up-to-date weights had 39 to 54 % (lab/evidence/README.md).
"""

# --- places

PLACES, STEP = (0, 8, 32, 64, 256), (4, 16)
"""Starts of the places of a turn: a prefix shows in the first two; the fourth is the reference. Or a prefix shows as a
step between the first 4 tokens and the next ones, which fading noise does not have.
"""
SHORT_FACTOR = 2.0
"""Factor on the limits if turns end before the fourth place, because noise fades within the reference."""
PER_OCTAVE, FIRST_LATE = 4, 20
"""Bins of positions per octave; the first bin, from position 31 on, at which a difference may begin."""
PLACE_FACTOR, PLACE_K3_FACTOR, LEAST_LATE, LEAST_BEHIND = 2.0, 5.0, 0.1, 2
"""Factors in shift and in k3 between places: fading noise gave 1.6 and 3 in one engine of the lab. The least share of
k3 of late tokens. The least number of bins after a place.
"""

# --- distributions

WITHIN, LEAST_WITHIN, MOST_WITHIN = 0.6, 0.3, 0.92
"""Share of the variance of log-probs within positions, which a temperature scales: the usual value, and its range in
nine kinds of logits. It cannot be measured from log-probs. A share of k3 from it is correct within a factor of 2.
"""
MIN_EXPLAINED, MIN_SLOPE, MIN_SLOPE_ERRORS = 0.06, 0.01, 6.0
"""The least share of the variance explained by a line, which is a tenth of k3 from a temperature. The least slope: 0.01
changes no run. Standard errors of the slope.
"""
CUT_EXPLAINED, ONE_SIDED, FITS, SAMPLED_FACTOR = 0.45, 0.9, 0.5, 0.5
"""Truncated sampling gives a rising line up to 0.42 and a fit to a power of -0.94 to -1; a temperature gives less than
0.5. The trainer's side sampled if its mean ratio is closer to 1 by the last factor.
"""
SMALLEST_TEMPERATURE = 0.1
MIN_DEFICIT, MIN_DEFICIT_ERRORS, MIN_BELOW = 1e-3, 8.0, 0.9
"""Truncated sampling: the mean ratio is below 1 by this deficit and this many standard errors, and this share of the
larger differences is below 0.
"""
SURE, SURE_BOUNDED, BOUNDED = (0.03, 20.0), (0.005, 12.0), 3.0
"""Deficit and standard errors that only truncated sampling reaches, in general, and if no token loses 3 nats. Other
prompts of a trained model gave 0.014 and 9.
"""
MAX_PADDING_GAP, SMALLEST_SHIFT = 0.05, 1e-5
REPEATED_APART, MIN_REPEATED = 0.25, 32
"""Penalties: the shares of uncertain tokens that the trainer finds more probable, among tokens that occurred before and
other tokens, differ by this much; the least number of tokens of each kind.
"""

# --- tails

TAIL_FACTOR, TAIL_K3_SHARE, FEW_SHARE, MAX_TAIL_SHARE = 12.0, 0.6, 0.002, 0.03
"""Tokens that differ by this factor more than is typical, with this share of k3. If experts differ, these are 0.5 to
1.3 % of the tokens with 0.75 to 0.95 of k3; if only precision differs, they have less than 0.45, or are more than 4 %.
"""
MAX_FORMULA_STEPS, ALL = 1.5, 0.99

# --- sizes

KERNEL_K3, PRETRAINED_K3, QUANTIZED_K3 = 1e-3, 3e-3, 7e-2
"""The largest k3 per token that bfloat16 kernels of small models, those of SmolLM2-135M, and low precision of
SmolLM2-135M explain. Other models have other limits (Qwen2.5-Coder-1.5B has 2e-4 and 0.3). They only choose which class
of a size comes first; the other classes are among its alternatives.
"""
SMALLEST_VOCABULARY, USUAL_VOCABULARY = 32, 32_000
"""Tokens: of a letter vocabulary, and of the smallest usual language model. A guess among more tokens is worse."""
MAX_LISTED = 5

LOG_NEARLY_CERTAIN = math.log(NEARLY_CERTAIN)
