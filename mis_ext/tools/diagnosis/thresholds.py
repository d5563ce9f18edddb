# SPDX-License-Identifier: Apache-2.0
"""Every threshold of the diagnosis. Each one follows from the geometry of a cause or from chance, unless it says so."""

import math

# --- chance

MIN_TOKENS = 64
"""Fewer tokens, or pairs of neighbours, say too little about sizes, lines and shifts."""
MIN_SAMPLES = 16
"""Fewer responses do not form two groups."""
MAX_CHANCE = 1e-3
"""A smaller chance is no coincidence."""
SAMPLED_ERRORS = 3.0
"""Standard errors. The mean of p / q over tokens that q sampled is 1, or less where few ratios have much of it."""
PLACE_ERRORS, STEP_ERRORS = 6.0, 3.0
"""Standard errors between two places of a response, two steps, or two weight versions."""

# --- how much must be explained

MIN_K3_SHARE = 0.1
"""A smaller share of k3 in less than a hundredth of the tokens is never certain and never the headline."""
MAIN_SHARE = 0.5
"""Of k3: a cause that explains so much leaves no tail or place to name."""
SHAPE_OF_CHANGE = 0.8
"""Of k3: where k3 changes over steps, a place or a tail has so much, or it is only where the change shows most."""
MAX_EXPLAINED = 0.87
"""If other causes explain more of k3, the rest has no name: shares are not that exact."""
MAX_EXPLAINED_OF_WEIGHTS = 0.3
"""If other causes explain more of k3, its size is no evidence about weights."""

# --- placeholders and log-probs that are none

MIN_CONSTANT_TOKENS, MIN_PLACEHOLDERS = 8, 2
"""So many equal log-probs are no coincidence; one extreme token is no pattern."""
PLACEHOLDER, MAX_LOG_PROB = -1000.0, 0.1
"""Nats. No model gives a sampled token less in any dtype. Rounding the log-sum-exp to bfloat16 gives no more."""
IMPROBABLE, CERTAIN, NEARLY_CERTAIN = -1.0, 0.98, 0.999
"""Nats: what the other side finds less probable had no probability of 1. Two probabilities: above them a token says
little about engines; and two log-probs may be equal by saturation alone."""
ZEROS_OF_A_CUT = 0.5
"""Zeros in place of log-probs are as often improbable to the other side as the rest, 1 times; zeros of a cut, to which
it left no alternative, 0 times. This is halfway."""
MAX_FAR = 0.4
"""Share of tokens in responses of another text, up to which their zeros are of that text."""
ZEROS_OF_A_PLACE, ZEROS_ELSEWHERE = 0.25, 0.25
"""Zeros at one place of so many responses are no log-probs, unless alike tokens elsewhere are zeros so often as there.
(Responses that a length limit ends have no end token.)"""
MAX_ZERO_GAP = 0.01
"""Nats. Behavior log-probs that are all 0 need a trainer that is as certain."""
MAX_CONSTANT_SPREAD, MAX_MEAN_ABS_DIFF = 0.1, 0.3
"""Nats. Constants are legitimate where the other side varies less; a larger mean difference is no mismatch of kernels
in any model of the lab (at most 0.1)."""
SUSPICIOUS_SHARE, ZERO_SHARE, MANY_POSITIVE = 0.01, 0.05, 0.5
"""Of tokens: a mistake is a pattern from here on; a 0 may be that of a token without alternative; all of a response
are wrong where most are above 0."""
BASE_FACTOR, EXACT = 2.0 / 3.0, 0.45
"""Of the mean distance of the differences from their median: what another base leaves at most where it makes the mean
ratio 1, and where it does not, so that what is left is noise."""

# --- shifted

LAGS = (1, 2, 3)
"""Tokens by which one side may be shifted."""
SHIFT_FACTOR, MIN_SHIFTED_TOKENS, MIN_SHIFTED_DIFF = 0.5, 8, 0.1
"""Log-probs that fit so much better when moved by tokens are misaligned, if so many tokens of a response, half of them
in either half of it, differ by so many nats."""

# --- groups of responses

GROUP_FACTOR, MIN_GROUP_SIZE = 3.0, 3
"""Two groups differ by this factor in ``|d| / (1 - p)``; the smaller has so many responses."""
MAX_BETWEEN, GROUP_SPREAD = 0.2, 0.05
"""Of the smaller group, so many responses at most are in the middle third between both medians. The least standard
deviation of a group, in log units: a response is a sample itself."""
TELLS_APART, MAX_PERIOD = 0.9, 20
"""Balanced accuracy with which one attribute tells two groups apart; the longest period of a row of responses."""
MIN_STILL, MIN_ROOM, MOVED_FACTOR = 0.5, 1e-6, 5.0
"""Another text is as frequent where weights have not moved, by chance half as frequent at least. They have moved in
steps that differ by this factor (at most 2.5 in 36 runs with up-to-date weights, 13 and more where an update moved a
nearly certain policy); samples whose mean 1 - p is below the second are rounded too much to tell."""
MAX_STALE_DIFF = 1.0
"""Nats per token, where most open tokens were raised: another text is farther. (Weights eight updates stale set 1 %
of the samples of SmolLM2 farther apart.)"""

# --- steps and versions

GROWTH, TYPICAL_GROWTH, NOTICED = 3.0, 1.4, 1.5
"""k3 has grown where it is so many times that of the first steps, and typical tokens so many times as far apart; a
change of the third factor is told beside a size."""
MIN_GROWING, RISING = 3, 0.75
"""Steps, and the share of steps with a rise, of a growth that is no jump."""
QUIET_K3 = 2e-4
"""So little may come and go, and is not named beside a main cause."""
MIN_OPEN, RAISED, RAISED_ERRORS = 200, 0.55, 4.0
"""Of so many open tokens, so many raised, and so many standard errors above one half: weights that have learned since.
121 measurements with up-to-date weights had 39 to 54 % (lab/evidence/README.md)."""

# --- places

PLACES, STEP = (0, 8, 32, 64, 256), (4, 16)
"""Starts of the places of a turn: a prefix shows in the first two, the fourth is the reference. Or as a step between so
many tokens and the next ones, which noise that fades does not have."""
SHORT_FACTOR = 2.0
"""Factor of the limits if turns end before the fourth place, because noise fades within the reference."""
PER_OCTAVE, FIRST_LATE = 4, 20
"""Bins of positions, each a quarter of an octave; the first, from 31 on, that may begin to differ."""
PLACE_FACTOR, PLACE_K3_FACTOR, LEAST_LATE, LEAST_BEHIND = 2.0, 5.0, 0.1, 2
"""Factors in shift and in k3 between places: noise that fades gave 1.6 and 3 in one engine of the lab. The least share
of k3 of late tokens, and bins behind a place."""

# --- distributions

WITHIN, LEAST_WITHIN, MOST_WITHIN = 0.6, 0.3, 0.92
"""Share of the variance of log-probs within positions, which a temperature moves: the usual one, and its range in nine
kinds of logits. No log-prob shows it. A share of k3 from it is right within a factor of 2."""
MIN_EXPLAINED, MIN_SLOPE, MIN_SLOPE_ERRORS = 0.06, 0.01, 6.0
"""Of the variance by a line: a tenth of k3 by a temperature; and its least slope: a hundredth changes no run."""
CUT_EXPLAINED, ONE_SIDED, FITS, SAMPLED_FACTOR = 0.45, 0.9, 0.5, 0.5
"""A cut looks like a rising line up to 0.42; it fits a power with -0.94 to -1; a temperature with less than 0.5; and
the trainer's side sampled where its mean ratio is nearer to 1 by the last."""
SMALLEST_TEMPERATURE = 0.1
MIN_DEFICIT, MIN_DEFICIT_ERRORS, MIN_BELOW = 1e-3, 8.0, 0.9
"""A mean ratio below 1 by so much and so many errors, with so many of the larger differences below 0, is of a cut."""
SURE, SURE_BOUNDED, BOUNDED = (0.03, 20.0), (0.005, 12.0), 3.0
"""Deficit and errors with which nothing but a cut lowers the mean ratio, in general and where no token loses so many
nats: other prompts of a trained model leave 0.014 and 9."""
MAX_PADDING_GAP, SMALLEST_SHIFT = 0.05, 1e-5
REPEATED_APART, MIN_REPEATED = 0.25, 32
"""Penalties: of uncertain tokens that occurred before and of the others, the shares that the trainer finds more
probable differ by so much; and so many tokens of either kind."""

# --- tails

TAIL_FACTOR, TAIL_K3_SHARE, FEW_SHARE, MAX_TAIL_SHARE = 12.0, 0.6, 0.002, 0.03
"""Tokens so many times as far apart as is typical, with so much of k3: 0.5 to 1.3 % of them, with 0.75 to 0.95 of k3,
where experts differ; less than 0.45, or more than 4 %, where only precision differs."""
MAX_FORMULA_STEPS, ALL = 1.5, 0.99

# --- sizes

KERNEL_K3, PRETRAINED_K3, QUANTISED_K3 = 1e-3, 3e-3, 7e-2
"""Up to where kernels in bfloat16 of small models, of SmolLM2-135M, and low precision there explain a k3 per token.
They are no limits of other models (Qwen2.5-Coder-1.5B has 2e-4 and 0.3): they choose which of several words for a size
comes first, and the others are among its alternatives."""
SMALLEST_VOCABULARY, USUAL_VOCABULARY = 32, 32_000
"""Tokens: letters, and what language models have at least. A guess among more is still worse."""
MAX_LISTED = 5

LOG_NEARLY_CERTAIN = math.log(NEARLY_CERTAIN)
