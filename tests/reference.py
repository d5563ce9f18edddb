"""The judge of every other test: the correction in float64, one sequence at a time, written from the specification.

Nothing here comes from `mis_ext`, and nothing is fast. A call is a `Samples`: the whole responses that one
data-parallel rank passes to one hook call. `correct` takes the calls that all data-parallel ranks make together.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

LOG_RATIO_LIMIT = 20.0
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


@dataclass(frozen=True)
class Samples:
    """Whole responses of one call on one data-parallel rank: three lists of 1-D tensors."""

    train: list[torch.Tensor]
    rollout: list[torch.Tensor]
    masks: list[torch.Tensor]

    def __add__(self, other: "Samples") -> "Samples":
        return Samples(self.train + other.train, self.rollout + other.rollout, self.masks + other.masks)


# Statistics of a token from its log ratio and both log-probs; the bounds of the first ones are compared as logs.
LOG_STATISTICS: dict[str, Callable[[float, float, float], float]] = {
    "ratio": lambda d, train, rollout: d,
    "proximal_probability": lambda d, train, rollout: train,
    "behavior_probability": lambda d, train, rollout: rollout,
}
STATISTICS = LOG_STATISTICS | {
    "abs_log_ratio": lambda d, train, rollout: abs(d),
    "k2": lambda d, train, rollout: clamped(d) ** 2 / 2,
    "k3": lambda d, train, rollout: math.exp(clamped(d)) - 1 - min(d, LOG_RATIO_LIMIT),
    "probability_difference": lambda d, train, rollout: abs(bounded_exp(train) - bounded_exp(rollout)),
}


@dataclass(frozen=True)
class Gate:
    """Keep what lies in [low, high] at `level` (token, sequence, geometric, max, min); metrics begin with `name`.

    With `action` zero what is outside loses its weight and stays in the mask. `after` names a gate on tokens: then only
    the tokens that it leaves are looked at.
    """

    name: str
    level: str
    low: float
    high: float
    statistic: str = "ratio"
    action: str = "reject"
    after: str | None = None

    @property
    def is_veto(self) -> bool:
        """One token can reject the sequence."""
        open_below = self.low == (0.0 if self.statistic in LOG_STATISTICS else -math.inf)
        return (self.level == "min" and self.high == math.inf) or (self.level == "max" and open_below)


@dataclass(frozen=True)
class Rules:
    """The flat keys, with the documented defaults filled in."""

    use_tis: bool
    level: str
    mode: str
    low: float
    high: float
    gates: list[Gate]
    normalize: bool
    scope: str
    over: str
    denominator: str
    metric_max: float
    only_outside: Gate | None = None

    @classmethod
    def from_keys(cls, keys: Mapping) -> "Rules":
        """Read the keys a user writes."""
        level = keys.get("tis_level", "token")
        mode = keys.get("tis_mode", "truncate")
        high = keys.get("tis_upper_bound", 2.0)
        low = keys.get("tis_lower_bound")
        low = 1 / high if low is None else low
        use_rs = bool(keys.get("use_rs", False))
        gates = []
        if mode == "mask" and level != "none":
            gates.append(Gate("tis_mask", level, low, high))
        if use_rs:
            rs_low, rs_high = keys.get("rs_lower_bound"), keys.get("rs_upper_bound")
            rs_low, rs_high = low if rs_low is None else rs_low, high if rs_high is None else rs_high
            gates.append(Gate("rs_mask", keys.get("rs_level", "token"), rs_low, rs_high))
        # The gate of the flat keys is the first one.
        for index, extra in enumerate(keys.get("rs_gates") or [], start=2):
            gates.append(Gate(f"rs_gate{index}", extra["level"], extra["low"], extra["high"]))
        if use_rs or not keys.get("rs_veto_requires_rs", False):
            gates += vetoes_of(keys)
        return cls(
            use_tis=bool(keys.get("use_tis", False)),
            level=level,
            mode=mode,
            low=low,
            high=high,
            gates=gates,
            normalize=bool(keys.get("tis_batch_normalize", False)) and level != "none",
            scope=keys.get("tis_normalize_scope", "data_parallel"),
            over=keys.get("tis_normalize_over", "kept"),
            denominator=keys.get("mis_denominator", "fixed"),
            metric_max=keys.get("mis_metric_max", 10.0),
        )


def vetoes_of(keys: Mapping) -> list[Gate]:
    """The vetoes among the flat keys."""
    vetoes = []
    if keys.get("rs_veto_threshold") is not None:
        vetoes.append(Gate("rs_catastrophic", "min", keys["rs_veto_threshold"], math.inf))
    if keys.get("rs_veto_upper_threshold") is not None:
        vetoes.append(Gate("rs_veto_upper", "max", 0.0, keys["rs_veto_upper_threshold"]))
    if keys.get("rs_veto_probability") is not None:
        low = keys["rs_veto_probability"]
        vetoes.append(Gate("rs_veto_probability", "min", low, math.inf, statistic="proximal_probability"))
    return vetoes


@dataclass(frozen=True)
class Corrected:
    """What one call must return.

    `weights` and `masks` hold one float list per sample. `tokens[name]` is the metric as the hook spreads it over the
    whole response (to be compared on response tokens only), `values[name]` the metric as one number, NaN when nothing
    was measured. `margin` is the smallest distance of a log ratio from a bound it was compared with.
    """

    weights: list[list[float]]
    masks: list[list[float]]
    tokens: dict[str, list[list[float]]]
    values: dict[str, float]
    margin: float


def bounded_exp(x: float) -> float:
    """The ratio of a log ratio."""
    return math.exp(min(max(x, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT))


def finite(x: float) -> float:
    """Nats of a metric; sums of so large numbers are finite."""
    return min(max(x, -1e6), 1e6)


def clamped(x: float) -> float:
    """The log ratio that `bounded_exp` uses."""
    return min(max(x, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT)


def log(x: float) -> float:
    """Logarithm with log 0 = -inf, so that a bound of 0 never rejects."""
    return -math.inf if x == 0 else math.log(x)


@dataclass
class Response:
    """One response while it is being judged."""

    train: list[float]
    rollout: list[float]
    response: list[bool]
    rules: Rules
    margins: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        pairs = list(zip(self.response, self.train, self.rollout, strict=True))
        self.valid = [r and math.isfinite(a) and math.isfinite(b) for r, a, b in pairs]
        self.d = [a - b if v else 0.0 for v, (_, a, b) in zip(self.valid, pairs, strict=True)]
        self.valid_d = [d for d, v in zip(self.d, self.valid, strict=True) if v]
        levels = [gate.level for gate in self.rules.gates] + [self.rules.level]
        whole = any(level in ("sequence", "geometric") for level in levels)
        broken = any(r and not v for r, v in zip(self.response, self.valid, strict=True))
        self.usable = [v and not (whole and broken) for v in self.valid]
        if self.rules.use_tis:
            self._reject()
            self._weigh()

    def __len__(self) -> int:
        return len(self.response)

    def statistic(self, level: str, name: str = "ratio", *, of: list[bool] | None = None) -> list[float]:
        """A statistic at a level, once per token; `of` says which tokens count, valid ones by default."""
        tokens = zip(self.valid, self.d, self.train, self.rollout, strict=True)
        values = [STATISTICS[name](d, t, r) if v else 0.0 for v, d, t, r in tokens]
        if level == "token":
            return values
        chosen = [x for x, c in zip(values, self.valid if of is None else of, strict=True) if c]
        reduced = {
            "sequence": lambda: math.fsum(chosen),
            "geometric": lambda: mean(chosen),
            "max": lambda: max(chosen, default=-math.inf),
            "min": lambda: min(chosen, default=math.inf),
        }[level]()
        return [reduced] * len(self)

    def below(self, x: float, bound: float, *, is_log: bool = True) -> bool:
        """x < log(bound), with a note of how close it was. Bounds of 1 are exact on exact data."""
        self._note(x, bound, is_log=is_log)
        return x < (log(bound) if is_log else bound)

    def above(self, x: float, bound: float, *, is_log: bool = True) -> bool:
        """x > log(bound)."""
        self._note(x, bound, is_log=is_log)
        return x > (log(bound) if is_log else bound)

    def _note(self, x: float, bound: float, *, is_log: bool = True) -> None:
        edge = log(bound) if is_log else bound
        if not (is_log and bound == 1.0) and math.isfinite(edge) and math.isfinite(x):
            self.margins.append(abs(x - edge))

    def looked_at(self, gate: Gate) -> list[bool]:
        """The tokens whose statistic a gate reduces."""
        if gate.after is None:
            return self.valid
        (other,) = (other for other in self.rules.gates if other.name == gate.after)
        return [v and not gone for v, gone in zip(self.valid, self.outside(other), strict=True)]

    def value(self, gate: Gate) -> list[float]:
        """What a gate compares with its bounds, once per token."""
        return self.statistic(gate.level, gate.statistic, of=self.looked_at(gate))

    def sides(self, gate: Gate, values: list[float]) -> tuple[list[bool], list[bool]]:
        """Per token whether its value is below the band, and whether it is above."""
        is_log = gate.statistic in LOG_STATISTICS
        pairs = list(zip(values, self.valid, strict=True))
        too_low = [v and self.below(x, gate.low, is_log=is_log) for x, v in pairs]
        return too_low, [v and self.above(x, gate.high, is_log=is_log) for x, v in pairs]

    def outside(self, gate: Gate) -> list[bool]:
        """Per token whether it, or its sequence, is outside the band."""
        return [low or high for low, high in zip(*self.sides(gate, self.value(gate)), strict=True)]

    def _reject(self) -> None:
        self.too_low, self.too_high, self.hits = {}, {}, {}
        self.masked, self.weighted = list(self.usable), list(self.usable)
        for gate in self.rules.gates:
            self.too_low[gate.name], self.too_high[gate.name] = self.sides(gate, self.value(gate))
            if gate.is_veto:
                alone = self.outside(replace(gate, level="token", after=None))
                self.hits[gate.name] = [hit and seen for hit, seen in zip(alone, self.looked_at(gate), strict=True)]
            left = self.masked if gate.action == "reject" else self.weighted
            left[:] = [k and not gone for k, gone in zip(left, self.outside(gate), strict=True)]
        # What trains.
        self.kept = [m and w for m, w in zip(self.masked, self.weighted, strict=True)]

    def _weigh(self) -> None:
        rules = self.rules
        if rules.level == "none":
            self.ratio = [float(v) for v in self.valid]
            self.bounded = list(self.ratio)
            self.weight = [float(u) for u in self.usable]
            return
        acts = [True] * len(self)
        if rules.only_outside is not None:
            acts = self.outside(rules.only_outside)
        x = self.statistic(rules.level)
        self.beyond_low = [v and self.below(xi, rules.low) for xi, v in zip(x, self.valid, strict=True)]
        self.beyond_high = [v and self.above(xi, rules.high) for xi, v in zip(x, self.valid, strict=True)]
        self.ratio = [bounded_exp(xi) if v else 0.0 for xi, v in zip(x, self.valid, strict=True)]
        if rules.mode == "truncate":
            for xi in self.statistic(rules.level):
                self._note(xi, 1.0 / rules.high)
        bounded = {
            "truncate": lambda w: min(w, rules.high),
            "clip": lambda w: min(max(w, rules.low), rules.high),
            "mask": lambda w: w,
            "unbounded": lambda w: w,
        }[rules.mode]
        ratios = zip(self.ratio, self.valid, acts, strict=True)
        self.bounded = [(bounded(w) if act else w) if v else 0.0 for w, v, act in ratios]
        self.weight = [w if u else 0.0 for w, u in zip(self.bounded, self.usable, strict=True)]


def read(samples: Samples, rules: Rules) -> list[Response]:
    """The responses of one call; whatever dtype comes in, its exact values are judged."""
    return [
        Response(t.double().tolist(), r.double().tolist(), [m != 0 for m in mask.tolist()], rules)
        for t, r, mask in zip(samples.train, samples.rollout, samples.masks, strict=True)
    ]


def mean_weight(responses: Iterable[Response], rules: Rules) -> float:
    """The normaliser: over tokens for token weights, over sequences otherwise; 1 when nothing counts."""
    counted = []
    for response in responses:
        chosen = response.kept if rules.over == "kept" else response.usable
        weights = [w for w, c in zip(response.weight, chosen, strict=True) if c]
        counted += weights if rules.level == "token" else weights[:1]
    return math.fsum(counted) / len(counted) if counted else 1.0


def survivor_scale(responses: Sequence[Response], *, per_token_loss: bool) -> float:
    """What makes up for rejected terms that stay in the host's denominator; 1 when nothing is kept."""
    counts = [(sum(r.kept), sum(r.response)) for r in responses if any(r.response)]
    if not any(kept for kept, _ in counts):
        return 1.0
    if per_token_loss:
        return sum(total for _, total in counts) / sum(kept for kept, _ in counts)
    return len(counts) / math.fsum(kept / total for kept, total in counts)


def correct(
    calls: Sequence[Samples],
    keys: Mapping | Rules,
    *,
    per_token_loss: bool = False,
    rollout: Sequence[Samples] | None = None,
) -> list[Corrected]:
    """Judge the calls that all data-parallel ranks make together; `rollout` lists every call of the whole rollout."""
    rules = keys if isinstance(keys, Rules) else Rules.from_keys(keys)
    ranks = [read(samples, rules) for samples in calls]
    group = [response for responses in ranks for response in responses]
    if rules.scope == "rollout":
        everything = [response for samples in rollout or calls for response in read(samples, rules)]
    else:
        everything = group
    out = []
    for responses in ranks:
        scope = responses if rules.scope == "micro_batch" else everything
        record = Record(responses)
        add_mismatch_metrics(record, group, rules)
        weights, masks = [], []
        if rules.use_tis:
            m = mean_weight(scope, rules) if rules.normalize else 1.0
            g = survivor_scale(scope, per_token_loss=per_token_loss) if rules.denominator == "kept" else 1.0
            weights = [
                [w / m * g if weighted else 0.0 for w, weighted in zip(r.weight, r.weighted, strict=True)]
                for r in responses
            ]
            masks = [[float(m) for m in response.masked] for response in responses]
            add_correction_metrics(record, group, g / m, rules)
            if rules.normalize:
                record.constant("batch_norm_factor", m)
            if rules.denominator == "kept":
                record.constant("denominator_factor", g)
        margin = min((x for response in [*everything, *group] for x in response.margins), default=math.inf)
        out.append(Corrected(weights, masks, record.tokens, record.values, margin))
    return out


class Record:
    """Metrics of one call, each as the host sees it per token and as one number."""

    def __init__(self, responses: list[Response]) -> None:
        self.responses = responses
        self.tokens: dict[str, list[list[float]]] = {}
        self.values: dict[str, float] = {}

    def per_token(self, name: str, values: list[list[float]], *, over: str) -> None:
        """Kind T and R: a mean over the tokens of `over` ("valid" or "response"); the host sees each sequence's."""
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
        self.tokens[f"mis_{name}"] = [
            [value] * len(response) for response, value in zip(self.responses, of_sequences, strict=True)
        ]


def mean(values: Iterable[float]) -> float:
    """Mean, 0 of nothing."""
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def add_mismatch_metrics(record: Record, group: list[Response], rules: Rules) -> None:
    """How far the engines are apart: never touched by weights, gates or vetoes."""
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
        "ratio_above_2_fraction": [[float(r.above(d, 2.0)) for d in r.d] for r in record.responses],
        "ratio_below_half_fraction": [[float(r.below(d, 0.5)) for d in r.d] for r in record.responses],
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
    record.constant("lr_multiplier_token", math.sqrt(effective_share(ratios)))
    record.constant("lr_multiplier_seq", math.sqrt(effective_share(products)))
    record.constant("ratio_max", max(ratios, default=math.nan))
    record.constant("ratio_min", min(ratios, default=math.nan))
    broken = [[float(x and not v) for x, v in zip(r.response, r.valid, strict=True)] for r in record.responses]
    record.per_token("nonfinite_token_fraction", broken, over="response")
    record.per_token("train_rollout_logprob_abs_diff_invalid", broken, over="response")
    shifts = [mean(-d for d in response.valid_d) for response in group if response.valid_d]
    record.constant("log_ppl_diff_min", min(shifts, default=math.nan))
    record.constant("log_ppl_diff_max", max(shifts, default=math.nan))
    differences = [abs(d) for response in group for d in response.valid_d]
    record.constant("train_rollout_logprob_abs_diff_max", max(differences, default=math.nan))


def effective_share(ratios: list[float]) -> float:
    """Effective sample size over sample size."""
    if not ratios:
        return math.nan
    return math.fsum(ratios) ** 2 / (len(ratios) * math.fsum(r * r for r in ratios))


def add_correction_metrics(record: Record, group: list[Response], scale: float, rules: Rules) -> None:
    """What the correction did; `scale` multiplies every weight, `group` are the responses of all ranks."""
    responses = record.responses

    def at_level(name: str, level: str, values: list[list[float]], *, over: str) -> None:
        if level == "token":
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
        if rules.mode == "truncate":
            at_level("tis_truncate_fraction", rules.level, highs, over="valid")
            tiny = floats(
                [
                    [v and x < -log(rules.high) for x, v in zip(r.statistic(rules.level), r.valid, strict=True)]
                    for r in responses
                ]
            )
            at_level("tis_truncate_fraction_low", rules.level, tiny, over="valid")
        if rules.mode in ("clip", "mask"):
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
            record.per_token(f"{gate.name}_token_fraction", floats(hits), over="valid")
            record.per_sequence(f"{gate.name}_seq_fraction", [float(any(h)) for h in hits], over="valid")
        else:
            lows = floats([r.too_low[gate.name] for r in responses])
            highs = floats([r.too_high[gate.name] for r in responses])
            at_level(f"{gate.name}_fraction_low", gate.level, lows, over="valid")
            at_level(f"{gate.name}_fraction_high", gate.level, highs, over="valid")
        shown = bounded_exp if gate.statistic in LOG_STATISTICS else float
        values = [[shown(x) if any(r.looked_at(gate)) else math.nan for x in r.value(gate)] for r in responses]
        at_level(f"{gate.name}_value", gate.level, values, over="valid")
    record.per_token("kept_token_fraction", floats([r.masked for r in responses]), over="response")
    record.per_sequence("kept_seq_fraction", [float(any(r.masked)) for r in responses], over="response")


def add_spread_of_weights(record: Record, group: list[Response], rules: Rules) -> None:
    """Standard deviation and effective sample size of the bounded weights of all ranks."""
    weights = []
    for response in group:
        chosen = [w for w, v in zip(response.bounded, response.valid, strict=True) if v]
        weights += chosen if rules.level == "token" else chosen[:1]
    average = mean(weights)
    variance = math.fsum((w - average) ** 2 for w in weights) / len(weights) if weights else math.nan
    record.constant("tis_weight_std", math.sqrt(variance))
    record.constant("tis_weight_ess", effective_share(weights))
