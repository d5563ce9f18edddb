"""Which golden cases there are: configurations x layouts x kinds of data x the hosts' two reducers."""

import itertools
from typing import NamedTuple

import yaml
from golden_data import KINDS
from golden_ranks import ROOT, Layout

EVERYWHERE = {"mis_guard": "warn", "mis_metrics": "all"}

FLAT: dict[str, dict] = {
    "token clip, all vetoes": {
        "tis_level": "token",
        "tis_mode": "clip",
        "tis_lower_bound": 0.75,
        "tis_upper_bound": 1.5,
        "rs_veto_threshold": 0.01,
        "rs_veto_upper_threshold": 100.0,
        "rs_veto_probability": 0.02,
    },
    "token truncate, inherited token gate, valid": {
        "tis_level": "token",
        "tis_mode": "truncate",
        "tis_upper_bound": 1.5,
        "use_rs": True,
        "tis_batch_normalize": True,
        "tis_normalize_over": "valid",
    },
    "token mask, token gate, kept in the micro-batch": {
        "tis_level": "token",
        "tis_mode": "mask",
        "tis_lower_bound": 0.6,
        "tis_upper_bound": 2.5,
        "use_rs": True,
        "rs_level": "token",
        "rs_lower_bound": 0.5,
        "rs_upper_bound": 2.0,
        "tis_batch_normalize": True,
        "tis_normalize_scope": "micro_batch",
        "mis_denominator": "kept",
    },
    "sequence clip, token gate, valid": {
        "tis_level": "sequence",
        "tis_mode": "clip",
        "tis_lower_bound": 0.5,
        "tis_upper_bound": 2.5,
        "use_rs": True,
        "rs_level": "token",
        "rs_lower_bound": 0.6,
        "rs_upper_bound": 1.8,
        "tis_batch_normalize": True,
        "tis_normalize_over": "valid",
    },
    "sequence unbounded, upper veto, kept denominator": {
        "tis_level": "sequence",
        "tis_mode": "unbounded",
        "rs_veto_upper_threshold": 20.0,
        "mis_denominator": "kept",
    },
    "geometric truncate, kept over kept": {
        "tis_level": "geometric",
        "tis_mode": "truncate",
        "tis_upper_bound": 1.0625,
        "use_rs": True,
        "rs_level": "geometric",
        "rs_lower_bound": 0.92,
        "rs_upper_bound": 1.09,
        "tis_batch_normalize": True,
        "mis_denominator": "kept",
    },
    "geometric clip, sequence gate, kept in the micro-batch": {
        "tis_level": "geometric",
        "tis_mode": "clip",
        "tis_lower_bound": 0.95,
        "tis_upper_bound": 1.0625,
        "use_rs": True,
        "rs_level": "sequence",
        "rs_lower_bound": 0.3,
        "rs_upper_bound": 3.0,
        "tis_normalize_scope": "micro_batch",
        "mis_denominator": "kept",
    },
    "geometric unbounded, probability veto, small metrics": {
        "tis_level": "geometric",
        "tis_mode": "unbounded",
        "rs_veto_probability": 0.02,
        "mis_metric_max": 0.5,
    },
    "no weight, three gates, kept denominator": {
        "tis_level": "none",
        "use_rs": True,
        "rs_level": "token",
        "rs_lower_bound": 0.25,
        "rs_upper_bound": 4.0,
        "rs_gates": [
            {"level": "sequence", "low": 0.2, "high": 4.0},
            {"level": "geometric", "low": 0.92, "high": 1.09},
        ],
        "mis_denominator": "kept",
    },
    "no weight, token gate, lower veto": {
        "tis_level": "none",
        "use_rs": True,
        "rs_level": "token",
        "rs_lower_bound": 0.5,
        "rs_upper_bound": 2.0,
        "rs_veto_threshold": 0.05,
    },
}
NATIVE = {
    "weight": {"level": "token", "mode": "mask", "low": 0.5, "high": 3.0},
    "gates": [
        {"level": "token", "low": 0.4, "high": 2.5},
        {"level": "token", "low": 0.3, "high": 2.0},
        {"level": "sequence_max", "high": 30.0},
        {"level": "sequence_min", "low": 0.02, "statistic": "proximal_probability"},
    ],
    "normalize_over": "kept",
    "denominator": "kept",
    "metrics": "all",
    "guard": "warn",
}
FEW = (1, 2, 64, 200, 65, 30, 9)
OTHERS = (3, 128, 70, 1, 40)
MANY = tuple(1 + 7 * index % 37 for index in range(40))
LAYOUTS = {
    "whole": Layout((FEW,)),
    "many samples": Layout((MANY,)),
    "CP 2": Layout((FEW,), cp_size=2),
    "CP 4": Layout((FEW,), cp_size=4),
    "CP 2 padded": Layout((FEW,), cp_size=2, is_padded=True),
    "DP 2": Layout((FEW, OTHERS)),
    "CP 2 x DP 2": Layout((FEW, OTHERS), cp_size=2),
}
REDUCERS = {"sample means": False, "token sums": True}


class Case(NamedTuple):
    """One point of the grid."""

    config: str
    layout: str
    kind: str
    reducer: str

    @property
    def name(self) -> str:
        """What the record and the tables call it."""
        return " | ".join(self)


def configurations() -> dict[str, dict]:
    """Keys by name: the presets, and what no preset covers."""
    presets = {path.stem: yaml.safe_load(path.read_text()) for path in sorted((ROOT / "yaml").glob("*.yaml"))}
    # Recorded under the name it had; the default of today has the keys of token_tis.
    presets["mis"] = presets.pop("gated_mis")
    flat = {name: {"use_tis": True, **keys} for name, keys in FLAT.items()}
    return {name: keys | EVERYWHERE for name, keys in (presets | flat).items()} | {"native": {"mis": NATIVE}}


def cases(backend: str) -> list[Case]:
    """The cases of one backend; fewer of Triton, whose interpreter takes seconds for each."""
    if backend == "eager":
        return [Case(*axes) for axes in itertools.product(configurations(), LAYOUTS, KINDS, REDUCERS)]
    axes = itertools.product(*map(enumerate, (configurations(), ("whole", "CP 2"), ("clean", "poison"))))
    reducers = list(REDUCERS)
    return [Case(config, layout, kind, reducers[(i + j + k) % 2]) for (i, config), (j, layout), (k, kind) in axes]
