"""The judge of every other test: the correction in float64, one sequence at a time, written from the specification.

Nothing here comes from `mis_ext`, and nothing is fast. A call is a `Samples`: the whole responses that one
data-parallel rank passes to one hook call. `correct` takes the calls that all data-parallel ranks make together.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True)
class Gate:
    """Keep what lies in [low, high] at `level`; `name` is the stem of its two metrics."""

    name: str
    level: str
    low: float
    high: float


@dataclass(frozen=True)
class Rules:
    """The flat keys, with the documented defaults filled in."""

    use_tis: bool
    level: str
    mode: str
    low: float
    high: float
    gates: list[Gate]
    veto_low: float | None
    veto_high: float | None
    veto_probability: float | None
    normalize: bool
    scope: str
    over: str
    denominator: str
    metric_max: float

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
        veto = use_rs or not keys.get("rs_veto_requires_rs", False)
        return cls(
            use_tis=bool(keys.get("use_tis", False)),
            level=level,
            mode=mode,
            low=low,
            high=high,
            gates=gates,
            veto_low=keys.get("rs_veto_threshold") if veto else None,
            veto_high=keys.get("rs_veto_upper_threshold") if veto else None,
            veto_probability=keys.get("rs_veto_probability") if veto else None,
            normalize=bool(keys.get("tis_batch_normalize", False)) and level != "none",
            scope=keys.get("tis_normalize_scope", "data_parallel"),
            over=keys.get("tis_normalize_over", "kept"),
            denominator=keys.get("mis_denominator", "fixed"),
            metric_max=keys.get("mis_metric_max", 10.0),
        )


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

    def statistic(self, level: str) -> list[float]:
        """The log ratio at a level, once per token."""
        if level == "token":
            return self.d
        total = math.fsum(self.valid_d)
        if level == "geometric" and self.valid_d:
            total /= len(self.valid_d)
        return [total] * len(self)

    def below(self, x: float, bound: float) -> bool:
        """x < log(bound), with a note of how close it was. Bounds of 1 are exact on exact data."""
        self._note(x, bound)
        return x < log(bound)

    def above(self, x: float, bound: float) -> bool:
        """x > log(bound)."""
        self._note(x, bound)
        return x > log(bound)

    def _note(self, x: float, bound: float) -> None:
        if bound != 1.0:
            self.margins.append(abs(x - log(bound)))

    def _reject(self) -> None:
        rules = self.rules
        self.too_low, self.too_high = {}, {}
        keep = list(self.usable)
        for gate in rules.gates:
            x = self.statistic(gate.level)
            self.too_low[gate.name] = [v and self.below(xi, gate.low) for xi, v in zip(x, self.valid, strict=True)]
            self.too_high[gate.name] = [v and self.above(xi, gate.high) for xi, v in zip(x, self.valid, strict=True)]
            outside = zip(self.too_low[gate.name], self.too_high[gate.name], strict=True)
            keep = [k and not (lo or hi) for k, (lo, hi) in zip(keep, outside, strict=True)]
        self.vetoes = {}
        pairs = list(zip(self.valid, self.d, strict=True))
        if rules.veto_low is not None:
            self.vetoes["rs_catastrophic"] = [v and self.below(d, rules.veto_low) for v, d in pairs]
        if rules.veto_high is not None:
            self.vetoes["rs_veto_upper"] = [v and self.above(d, rules.veto_high) for v, d in pairs]
        if rules.veto_probability is not None:
            scored = zip(self.valid, self.train, strict=True)
            self.vetoes["rs_veto_probability"] = [v and self.below(t, rules.veto_probability) for v, t in scored]
        if any(any(hits) for hits in self.vetoes.values()):
            keep = [False] * len(self)
        self.kept = keep

    def _weigh(self) -> None:
        rules = self.rules
        if rules.level == "none":
            self.ratio = [float(u) for u in self.usable]
            self.weight = list(self.ratio)
            return
        x = self.statistic(rules.level)
        self.beyond_low = [u and self.below(xi, rules.low) for xi, u in zip(x, self.usable, strict=True)]
        self.beyond_high = [u and self.above(xi, rules.high) for xi, u in zip(x, self.usable, strict=True)]
        self.ratio = [bounded_exp(xi) if u else 0.0 for xi, u in zip(x, self.usable, strict=True)]
        bounded = {
            "truncate": lambda w: min(w, rules.high),
            "clip": lambda w: min(max(w, rules.low), rules.high),
            "mask": lambda w: w,
            "unbounded": lambda w: w,
        }[rules.mode]
        self.weight = [bounded(w) if u else 0.0 for w, u in zip(self.ratio, self.usable, strict=True)]


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
    keys: Mapping,
    *,
    per_token_loss: bool = False,
    rollout: Sequence[Samples] | None = None,
) -> list[Corrected]:
    """Judge the calls that all data-parallel ranks make together; `rollout` lists every call of the whole rollout."""
    rules = Rules.from_keys(keys)
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
            weights = [[w / m * g for w in response.weight] for response in responses]
            masks = [[float(k) for k in response.kept] for response in responses]
            add_correction_metrics(record, weights, rules)
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
        """Kind T and R: a mean over the tokens of `over` ("valid", "usable" or "response")."""
        measured = [getattr(response, over) for response in self.responses]
        chosen = [v for vs, ms in zip(values, measured, strict=True) for v, m in zip(vs, ms, strict=True) if m]
        self.values[f"mis_{name}"] = math.fsum(chosen) / len(chosen) if chosen else math.nan
        scale = self._sequences_scale(over)
        spread = []
        for response, vs, ms in zip(self.responses, values, measured, strict=True):
            factor = scale * sum(response.response) / sum(ms) if any(ms) else 0.0
            spread.append([v * factor if m else 0.0 for v, m in zip(vs, ms, strict=True)])
        self.tokens[f"mis_{name}"] = spread

    def per_sequence(self, name: str, values: list[float], *, over: str) -> None:
        """Kind S: a mean over the sequences with at least one token of `over`."""
        measured = [any(getattr(response, over)) for response in self.responses]
        chosen = [v for v, m in zip(values, measured, strict=True) if m]
        self.values[f"mis_{name}"] = math.fsum(chosen) / len(chosen) if chosen else math.nan
        scale = self._sequences_scale(over)
        self.tokens[f"mis_{name}"] = [
            [v * scale if m else 0.0] * len(response)
            for response, v, m in zip(self.responses, values, measured, strict=True)
        ]

    def constant(self, name: str, value: float) -> None:
        """Kind G: one number of the whole group."""
        self.values[f"mis_{name}"] = value
        self.tokens[f"mis_{name}"] = [[value] * len(response) for response in self.responses]

    def _sequences_scale(self, over: str) -> float:
        with_response = sum(any(response.response) for response in self.responses)
        measured = sum(any(getattr(response, over)) for response in self.responses)
        return with_response / measured if measured else 0.0


def mean(values: Iterable[float]) -> float:
    """Mean, 0 of nothing."""
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def add_mismatch_metrics(record: Record, group: list[Response], rules: Rules) -> None:
    """How far the engines are apart: never touched by weights, gates or vetoes."""
    cap = rules.metric_max
    token_values: dict[str, list[list[float]]] = {
        "kl": [[-d for d in r.d] for r in record.responses],
        "k3_kl": [[min(math.exp(clamped(d)) - 1 - d, cap) for d in r.d] for r in record.responses],
        "logprob_abs_diff": [[abs(d) for d in r.d] for r in record.responses],
        "train_rollout_logprob_abs_diff_nonzero": [
            [float(t != b) for t, b in zip(r.train, r.rollout, strict=True)] for r in record.responses
        ],
        "tv": [[1 - min(1.0, bounded_exp(d)) for d in r.d] for r in record.responses],
        "ratio_above_2_fraction": [[float(r.above(d, 2.0)) for d in r.d] for r in record.responses],
        "ratio_below_half_fraction": [[float(r.below(d, 0.5)) for d in r.d] for r in record.responses],
    }
    sequence_values: dict[str, list[float]] = {name: [] for name in SEQUENCE_MISMATCH_NAMES}
    for response in record.responses:
        train = mean(-t for t, v in zip(response.train, response.valid, strict=True) if v)
        rollout = mean(-t for t, v in zip(response.rollout, response.valid, strict=True) if v)
        difference = mean(-d for d in response.valid_d)
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
    record.constant("ratio_max", max(ratios, default=math.nan))
    record.constant("ratio_min", min(ratios, default=math.nan))
    broken = [[float(x and not v) for x, v in zip(r.response, r.valid, strict=True)] for r in record.responses]
    record.per_token("nonfinite_token_fraction", broken, over="response")
    record.per_token("train_rollout_logprob_abs_diff_invalid", broken, over="response")
    differences = [abs(d) for response in group for d in response.valid_d]
    record.constant("train_rollout_logprob_abs_diff_max", max(differences, default=math.nan))


def effective_share(ratios: list[float]) -> float:
    """Effective sample size over sample size."""
    if not ratios:
        return math.nan
    return math.fsum(ratios) ** 2 / (len(ratios) * math.fsum(r * r for r in ratios))


def add_correction_metrics(record: Record, weights: list[list[float]], rules: Rules) -> None:
    """What the correction did."""
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
        at_level("tis_weight_before_bound", rules.level, [r.ratio for r in responses], over="usable")
        at_level("tis_weight_after_bound", rules.level, [r.weight for r in responses], over="usable")
        at_level("is_ratio_mean_after_tis_rs", rules.level, [r.weight for r in responses], over="usable")
        lows, highs = floats([r.beyond_low for r in responses]), floats([r.beyond_high for r in responses])
        if rules.mode == "truncate":
            at_level("tis_truncate_fraction", rules.level, highs, over="usable")
        if rules.mode in ("clip", "mask"):
            at_level(f"tis_{rules.mode}_fraction_low", rules.level, lows, over="usable")
            at_level(f"tis_{rules.mode}_fraction_high", rules.level, highs, over="usable")
        reducers = {"mean": mean, "min": lambda w: min(w, default=0.0), "max": lambda w: max(w, default=0.0)}
        for name, reduce in reducers.items():
            final = [
                reduce([w for w, u in zip(ws, r.usable, strict=True) if u])
                for ws, r in zip(weights, responses, strict=True)
            ]
            record.per_sequence(f"is_ratio_{name}_final", final, over="usable")
    for gate in rules.gates:
        if gate.name == "tis_mask":
            continue
        lows = floats([r.too_low[gate.name] for r in responses])
        highs = floats([r.too_high[gate.name] for r in responses])
        at_level(f"{gate.name}_fraction_low", gate.level, lows, over="valid")
        at_level(f"{gate.name}_fraction_high", gate.level, highs, over="valid")
    for name in ("rs_catastrophic", "rs_veto_upper", "rs_veto_probability"):
        if responses and name not in responses[0].vetoes:
            continue
        hits = [r.vetoes[name] for r in responses]
        record.per_token(f"{name}_token_fraction", floats(hits), over="valid")
        record.per_sequence(f"{name}_seq_fraction", [float(any(h)) for h in hits], over="valid")
    record.per_token("kept_token_fraction", floats([r.kept for r in responses]), over="response")
    record.per_sequence("kept_seq_fraction", [float(any(r.kept)) for r in responses], over="response")
