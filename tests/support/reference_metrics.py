# SPDX-License-Identifier: Apache-2.0
"""The metrics of the float64 reference, each per token as for the framework, and as one number."""

import math

from reference_numbers import LOG_RATIO_LIMIT, bounded_exp, clamped, effective_share, finite, log, mean
from reference_response import Response
from reference_rules import BOUNDS, LOG_STATISTICS, Rules

SEQUENCE_MISMATCH_NAMES = [
    "training_log_ppl",
    "training_ppl",
    "rollout_log_ppl",
    "rollout_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
    "chi2_token",
    "chi2_seq",
]


class Record:
    """Metrics of one call, each per token as for the framework, and as one number."""

    def __init__(self, responses: list[Response], *, per_token_loss: bool) -> None:
        self.responses, self.per_token_loss = responses, per_token_loss
        self.tokens: dict[str, list[list[float]]] = {}
        self.values: dict[str, float] = {}

    def per_token(self, name: str, values: list[list[float]], *, over: str) -> None:
        """Kind T and R: a mean over the tokens of `over` ("valid" or "response"), per sequence for the framework."""
        measured = [getattr(response, over) for response in self.responses]
        chosen = [v for vs, ms in zip(values, measured, strict=True) for v, m in zip(vs, ms, strict=True) if m]
        self.values[f"mis_{name}"] = math.fsum(chosen) / len(chosen) if chosen else math.nan
        of_sequences = [
            math.fsum(v for v, m in zip(vs, ms, strict=True) if m) / sum(ms) if any(ms) else math.nan
            for vs, ms in zip(values, measured, strict=True)
        ]
        self._spread(name, of_sequences)

    def per_sequence(self, name: str, values: list[float], *, over: str) -> None:
        """Kind S: a mean over the sequences with at least one token of `over`."""
        measured = [any(getattr(response, over)) for response in self.responses]
        chosen = [v for v, m in zip(values, measured, strict=True) if m]
        self.values[f"mis_{name}"] = math.fsum(chosen) / len(chosen) if chosen else math.nan
        self._spread(name, [v if m else math.nan for v, m in zip(values, measured, strict=True)])

    def constant(self, name: str, value: float) -> None:
        """Kind G: one number of the whole group."""
        self.values[f"mis_{name}"] = value
        self.tokens[f"mis_{name}"] = [[value] * len(response) for response in self.responses]

    def _spread(self, name: str, of_sequences: list[float]) -> None:
        """NaN of an unmeasured sequence becomes the mean of the measured ones, with the framework's weights."""
        shares = [sum(r.response) if self.per_token_loss else 1 for r in self.responses]
        known = [(v * n, n) for v, n in zip(of_sequences, shares, strict=True) if not math.isnan(v)]
        rest = math.fsum(v for v, _ in known) / sum(n for _, n in known) if known else math.nan
        of_sequences = [rest if math.isnan(value) else value for value in of_sequences]
        self.tokens[f"mis_{name}"] = [
            [value] * len(response) for response, value in zip(self.responses, of_sequences, strict=True)
        ]


def add_mismatch_metrics(record: Record, group: list[Response], rules: Rules) -> None:
    """The mismatch of the engines: independent of weights, gates and vetoes."""
    cap = rules.metric_max
    token_values: dict[str, list[list[float]]] = {
        "kl": [[finite(-d) for d in r.d] for r in record.responses],
        "k3_kl": [
            [min(math.exp(clamped(d)) - 1 - min(d, LOG_RATIO_LIMIT), cap) for d in r.d] for r in record.responses
        ],
        "logprob_abs_diff": [[finite(abs(d)) for d in r.d] for r in record.responses],
        "train_rollout_logprob_abs_diff_nonzero": [
            [float(t != b) for t, b in zip(r.train, r.rollout, strict=True)] for r in record.responses
        ],
        "tv": [[1 - min(1.0, bounded_exp(d)) for d in r.d] for r in record.responses],
        "phantom_clip_fraction": [[float(r.below(d, 0.8) or r.above(d, 1.2)) for d in r.d] for r in record.responses],
    }
    sequence_values: dict[str, list[float]] = {name: [] for name in SEQUENCE_MISMATCH_NAMES}
    for response in record.responses:
        train = finite(mean(-t for t, v in zip(response.train, response.valid, strict=True) if v))
        rollout = finite(mean(-t for t, v in zip(response.rollout, response.valid, strict=True) if v))
        difference = finite(mean(-d for d in response.valid_d))
        for name, value in {
            "training_log_ppl": train,
            "training_ppl": bounded_exp(train),
            "rollout_log_ppl": rollout,
            "rollout_ppl": bounded_exp(rollout),
            "log_ppl_diff": difference,
            "log_ppl_abs_diff": abs(difference),
            "ppl_ratio": bounded_exp(difference),
            "chi2_token": min(mean(math.exp(2 * clamped(d)) for d in response.valid_d) - 1, cap),
            "chi2_seq": min(math.exp(2 * clamped(math.fsum(response.valid_d))) - 1, cap),
        }.items():
            sequence_values[name].append(value)
    for name, values in token_values.items():
        record.per_token(name, values, over="valid")
    for name, values in sequence_values.items():
        record.per_sequence(name, values, over="valid")
    ratios = [bounded_exp(d) for response in group for d in response.valid_d]
    products = [bounded_exp(math.fsum(response.valid_d)) for response in group if response.valid_d]
    record.constant("ess_ratio_token", effective_share(ratios))
    record.constant("ess_ratio_seq", effective_share(products))
    open_d = [
        t - b
        for r in group
        for t, b, v in zip(r.train, r.rollout, r.valid, strict=True)
        if v and t != b and r.above(b, 0.05) and r.below(b, 0.9)
    ]
    record.constant("raised_fraction", mean(float(d > 0) for d in open_d) if open_d else math.nan)
    record.constant("ratio_max", max(ratios, default=math.nan))
    record.constant("ratio_min", min(ratios, default=math.nan))
    broken = [[float(x and not v) for x, v in zip(r.response, r.valid, strict=True)] for r in record.responses]
    record.per_token("nonfinite_token_fraction", broken, over="response")
    unmeasured = [float(any(r.response) and not any(r.valid)) for r in record.responses]
    record.per_sequence("unmeasured_seq_fraction", unmeasured, over="response")
    differences = [abs(d) for response in group for d in response.valid_d]
    record.constant("train_rollout_logprob_abs_diff_max", max(differences, default=math.nan))


def add_age_metrics(record: Record, group: list[Response], rules: Rules) -> None:
    """The mismatch on tokens of the trainer's own weights, and on tokens of older weights."""
    record.per_token("lag_mean", [r.lags for r in record.responses], over="dated")
    known = [lag for r in group for lag, d in zip(r.lags, r.dated, strict=True) if d]
    record.constant("lag_max", max(known, default=math.nan))
    unknown = [[float(v and not d) for v, d in zip(r.valid, r.dated, strict=True)] for r in record.responses]
    record.per_token("unknown_lag_token_fraction", unknown, over="response")
    stale = [[lag > 0 for lag in r.lags] for r in record.responses]
    record.per_token("stale_token_fraction", [[float(s) for s in each] for each in stale], over="valid")
    for age in ("fresh", "stale"):
        # Other tokens do not differ.
        own = [
            [d if (lag > 0) == (age == "stale") else 0.0 for d, lag in zip(r.d, r.lags, strict=True)]
            for r in record.responses
        ]
        k3 = [[min(math.exp(clamped(d)) - 1 - min(d, LOG_RATIO_LIMIT), rules.metric_max) for d in ds] for ds in own]
        record.per_token(f"k3_kl_{age}", k3, over="valid")


def add_correction_metrics(record: Record, group: list[Response], scale: float, rules: Rules) -> None:
    """The effect of the correction; `scale` multiplies every weight, `group` has the responses of all ranks."""
    responses = record.responses

    def at_level(name: str, level: str, values: list[list[float]], *, over: str) -> None:
        if level == "token" or level.startswith("segment"):
            record.per_token(name, values, over=over)
            return
        firsts = []
        for response, vs in zip(responses, values, strict=True):
            firsts.append(next((v for v, m in zip(vs, getattr(response, over), strict=True) if m), 0.0))
        record.per_sequence(name, firsts, over=over)

    def floats(flags: list[list[bool]]) -> list[list[float]]:
        return [[float(x) for x in xs] for xs in flags]

    if rules.level != "none":
        at_level("tis_weight_before_bound", rules.level, [r.ratio for r in responses], over="valid")
        at_level("tis_weight_after_bound", rules.level, [r.bounded for r in responses], over="valid")
        at_level("is_ratio_mean_after_tis_rs", rules.level, [r.bounded for r in responses], over="valid")
        add_spread_of_weights(record, group, rules)
        lows, highs = floats([r.beyond_low for r in responses]), floats([r.beyond_high for r in responses])
        edges = BOUNDS[rules.mode].edges
        if edges == "high":
            at_level(f"tis_{rules.mode}_fraction", rules.level, highs, over="valid")
            tiny = floats(
                [[v and x < -log(rules.high) for x, v in zip(r.weighed, r.valid, strict=True)] for r in responses]
            )
            at_level(f"tis_{rules.mode}_fraction_low", rules.level, tiny, over="valid")
        if edges == "both":
            at_level(f"tis_{rules.mode}_fraction_low", rules.level, lows, over="valid")
            at_level(f"tis_{rules.mode}_fraction_high", rules.level, highs, over="valid")
        reducers = {"mean": mean, "min": lambda w: min(w, default=0.0), "max": lambda w: max(w, default=0.0)}
        for name, reduce in reducers.items():
            final = [reduce([w * scale for w, v in zip(r.bounded, r.valid, strict=True) if v]) for r in responses]
            record.per_sequence(f"is_ratio_{name}_final", final, over="valid")
    for gate in rules.gates:
        if gate.name == "tis_mask":
            continue
        if gate.is_veto:
            hits = [r.hits[gate.name] for r in responses]
            record.per_token(f"{gate.name}_token_fraction", floats(hits), over="response")
            record.per_sequence(f"{gate.name}_seq_fraction", [float(any(h)) for h in hits], over="response")
        else:
            lows = floats([r.too_low[gate.name] for r in responses])
            highs = floats([r.too_high[gate.name] for r in responses])
            at_level(f"{gate.name}_fraction_low", gate.level, lows, over="valid")
            at_level(f"{gate.name}_fraction_high", gate.level, highs, over="valid")
        shown = bounded_exp if gate.statistic in LOG_STATISTICS else float
        values = [[shown(x) for x in r.value(gate)] for r in responses]
        if gate.level == "token" or gate.is_of_segments:
            record.per_token(f"{gate.name}_value", values, over="valid")
        else:
            firsts = [vs[0] if vs else math.nan for vs in values]
            record.per_sequence(f"{gate.name}_value", firsts, over="valid")
    record.per_token("kept_token_fraction", floats([r.masked for r in responses]), over="response")
    record.per_sequence("kept_seq_fraction", [float(any(r.masked)) for r in responses], over="response")


def add_spread_of_weights(record: Record, group: list[Response], rules: Rules) -> None:
    """Effective sample size of the bounded weights of all ranks."""
    weights = []
    for response in group:
        chosen = [w for w, v in zip(response.bounded, response.valid, strict=True) if v]
        weights += chosen if rules.level == "token" else chosen[:1]
    record.constant("tis_weight_ess", effective_share(weights))
