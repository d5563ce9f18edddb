# SPDX-License-Identifier: Apache-2.0
"""The JSON Schema of a configuration file, with which editors complete and check it while it is written.

It says of each key alone what is legal. What two keys mean together only the loader sees, which refuses all that the
schema refuses.
"""

from __future__ import annotations

import json
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mis_ext.correction.config import GUARD_NAMES, CorrectionConfig
from mis_ext.correction.gates import Action
from mis_ext.correction.statistics import STATISTICS, HookReduce
from mis_ext.correction.weights import (
    BOUNDS,
)
from mis_ext.keys.flat import CORRECTION_CHECKS, INSTEAD_OF_NULL, Baseline, BaselineOver
from mis_ext.keys.loss_keys import DEFAULT_SCORING
from mis_ext.keys.parts import LEVELS, read_gates
from mis_ext.keys.run_config import Scoring
from mis_ext.keys.strays import HOST_CLIPS, PREFIXES
from mis_ext.loss.settings import LossDenominator, Mode, PenaltyTokens, Proximal
from mis_ext.validation import check_bool, check_choice, check_number

_Node = dict[str, Any]
_WHEN_TEXT = "stale: weighs tokens of older weights alone, others have weight 1. Needs staleness."


def json_schema() -> _Node:
    """The schema (draft 7) of a file for ``--custom-config-path``."""
    keys = _flat_keys()
    ours = "|".join([*keys, *HOST_CLIPS])
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Configuration of mis_ext",
        "description": "For --custom-config-path of slime and Miles. Keys without our prefixes are those of the host.",
        "type": "object",
        "properties": keys,
        "patternProperties": {
            f"^(?!({ours})$)({'|'.join(PREFIXES)})": {"not": {}, "errorMessage": "mis_ext has no such key"}
        },
        "definitions": {"gate": _gate(), **_methods()},
    }


def schema_text() -> str:
    """The schema as JSON, with a line for each key: what changes is seen in a comparison of two files."""

    def lines(value: Any) -> str:
        rows = ",\n".join(f"  {json.dumps(key)}: {json.dumps(node)}" for key, node in value.items())
        return f"{{\n{rows}\n }}"

    parts = {
        key: lines(value) if key in ("properties", "definitions") else json.dumps(value)
        for key, value in json_schema().items()
    }
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {text}" for key, text in parts.items()) + "\n}\n"


def _flat_keys() -> dict[str, _Node]:
    texts = {
        "tis_level": "What the weight is the ratio of.",
        "tis_mode": _modes(),
        "tis_lower_bound": "Lower bound of the weight. Default: 1 / tis_upper_bound.",
        "tis_upper_bound": "Upper bound of the weight.",
        "tis_when": _WHEN_TEXT,
        "use_rs": "Rejects what lies outside of the rs bounds.",
        "rs_level": "What is compared with the rs bounds.",
        "rs_lower_bound": "Lower bound of what is kept. Default: that of the weight.",
        "rs_upper_bound": "Upper bound of what is kept. Default: that of the weight.",
        "rs_gates": "Further gates.",
        "rs_veto_threshold": "Rejects a response if a ratio in it is below.",
        "rs_veto_upper_threshold": "Rejects a response if a ratio in it is above.",
        "rs_veto_probability": "Rejects a response if the trainer's probability of a token is below.",
        "rs_veto_requires_rs": "The vetoes act only with use_rs.",
        "rs_max_staleness": "Rejects tokens of weights that are more updates old. Needs mis_staleness.",
        "rs_staleness_level": "Whether such a token leaves alone or with its response.",
        "tis_batch_normalize": "Divides the weights by their mean.",
        "tis_normalize_scope": "The samples of that mean.",
        "tis_normalize_over": "The tokens of that mean.",
        "mis_denominator": "Whether rejected tokens still count in it.",
    }
    nodes = {
        "use_tis": _bool("Corrects the loss; false measures only."),
        **{
            key: _checked(*CORRECTION_CHECKS[key], text, nullable=key not in INSTEAD_OF_NULL)
            for key, text in texts.items()
        },
        "mis_group_baseline": _words(get_args(Baseline), "What a reward is compared with.", "mean"),
        "mis_group_over": _words(get_args(BaselineOver), "Which trajectories of a prompt count in it.", "trained"),
        "mis_prompt_mean": _bool("Every prompt weighs the same.", False),
        "mis_loss_method": _method(),
        "mis_loss_mode": _words(get_args(Mode), "What the policy loss of mis_ext computes.", "baseline"),
        "mis_loss_denominator": _words(get_args(LossDenominator), "What a response is divided by.", "original"),
        "mis_loss_constant": _number(
            "Tokens, for mis_loss_denominator: constant.", low=0.0, high=math.inf, open_low=True
        ),
        "mis_loss_kl_tokens": _words(get_args(PenaltyTokens), "Tokens that have a KL penalty.", "kept"),
        "mis_loss_entropy_tokens": _words(get_args(PenaltyTokens), "Tokens that have an entropy bonus.", "kept"),
        "mis_loss_unbiased_kl": _bool("Multiplies the KL penalty by current / behavior.", False),
        "mis_loss_proximal": _words(get_args(Proximal), "Where the proximal log-probs come from.", "stored"),
        "mis_loss_scoring": _words(get_args(Scoring), "Who turns logits into log-probs.", DEFAULT_SCORING),
        "mis_loss_inplace": _bool("The gradient takes the place of the logits.", False),
        "get_mismatch_metrics": _bool("A flag of the host: calls mis_ext for its metrics.", False),
        "calculate_per_token_loss": _bool("A flag of the host: averages over tokens, not over samples.", False),
        "use_rollout_logprobs": _bool("A flag of the host: the engine's log-probs as the old policy.", False),
    }
    return nodes | {f"mis_{name}": node for name, node in _reporting().items()}


def _reporting() -> dict[str, _Node]:
    default = CorrectionConfig()
    how = {"enum": ["error", "warn"]}
    guards = {"type": "object", "properties": dict.fromkeys(GUARD_NAMES, how), "additionalProperties": False}
    metrics = {"anyOf": [{"enum": ["core", "all"]}, {"type": "array", "items": {"type": "string"}}]}
    return {
        "staleness": _bool("The rollout stores the version of each token: for lags, and metrics by age.", False),
        "metrics": _nullable(metrics, "core, all, or a list of names.", "core"),
        "metric_max": _number("The most that a token counts in k3.", default.metric_max, low=0.0, high=math.inf),
        "guard": _nullable({"anyOf": [how, guards]}, "What a guard does, all alike or one by one.", "error"),
        "compile": _nullable({"enum": ["auto", True, False]}, "Runs in graphs of torch.compile.", "auto"),
        "max_reject_fraction": _number("Warns when more is rejected.", default.max_reject_fraction, low=0.0, high=1.0),
    }


def _gates(description: str) -> _Node:
    return _nullable({"type": "array", "items": {"$ref": "#/definitions/gate"}}, description)


def _gate() -> _Node:
    anything: dict[str, Any] = {"low": -math.inf, "high": math.inf}
    statistics = "; ".join(f"{row.name}: {row.text}" for row in STATISTICS.values())
    return _object(
        {
            "statistic": _words(STATISTICS, f"What is compared. {statistics}", "ratio", nullable=False),
            "reduce": _words(get_args(HookReduce), "Over the tokens of a response.", "token", nullable=False),
            "level": _words(LEVELS, "In the place of reduce, in the hosts' words.", nullable=False),
            "low": _number("Smallest value that is kept.", **anything),
            "high": _number("Largest value that is kept.", **anything),
            "action": _words(
                get_args(Action), "reject: leaves the mask; zero: has weight 0, and stays.", "reject", nullable=False
            ),
            "after": {"type": ["string", "null"], "description": "Name of the gate whose tokens this one looks at."},
            "name": {"type": ["string", "null"], "description": "Of its metrics."},
        },
        description="A gate: what lies outside of its band is dropped.",
    )


def _method() -> _Node:
    from mis_ext.methods.catalogue import METHODS  # All methods: no call of the hook needs them.

    named = [{"$ref": f"#/definitions/{name}"} for name in _methods()]
    return _nullable(
        {"anyOf": [{"enum": [*METHODS]}, *named]},
        "A published method in the place of mis_loss_mode, by its name or with parameters: see mis-ext methods.",
    )


def _methods() -> dict[str, _Node]:
    from mis_ext.methods.catalogue import METHODS

    return {
        f"method_{name}": _object(
            {"name": {"const": name}} | {key: _parameter(hint) for key, hint in _parameters(row.make).items()},
            description=row.formula,
            required=["name"],
        )
        for name, row in METHODS.items()
    }


def _parameters(make: Any) -> dict[str, Any]:
    hints = get_type_hints(make, include_extras=True)
    return {name: hint for name, hint in hints.items() if name != "return"}


def _parameter(hint: Any) -> _Node:
    """What the annotation of a method's parameter allows in a file."""
    words = [word for each in (hint, *get_args(hint)) if get_origin(each) is Literal for word in get_args(each)]
    if words:
        return {"enum": [*words, None]}
    if get_origin(hint) is tuple:
        kinds = [_parameter(kind) for kind in get_args(hint)]
        return {"type": ["array", "null"], "items": kinds, "minItems": len(kinds), "maxItems": len(kinds)}
    legal = hint.__metadata__[0]
    # The smallest number may be another parameter.
    low = legal.low if isinstance(legal.low, float | int) else -math.inf
    return _number(f"In {legal}.", low=low, high=legal.high, open_low=legal.open_low, open_high=legal.open_high)


def _modes() -> str:
    return "How the weight is bounded. " + "; ".join(f"{row.name}: {row.text}" for row in BOUNDS.values())


def _object(properties: dict[str, _Node], **more: Any) -> _Node:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def _checked(check: Any, default: Any, description: str, *, nullable: bool) -> _Node:
    """What a check of ``CORRECTION_CHECKS`` lets pass: its words, or its range."""
    if check is check_bool:
        return _bool(description, default)
    if check is read_gates:
        return _gates(description)
    if check.func is check_choice:
        return _words(check.keywords["choices"], description, default, nullable=nullable)
    assert check.func is check_number, check
    return _number(description, default, **check.keywords)


def _bool(description: str, default: bool | None = None) -> _Node:
    return {"type": ["boolean", "null"], "description": description} | _default(default)


def _words(words: Any, description: str, default: str | None = None, *, nullable: bool = True) -> _Node:
    legal = [*words, None] if nullable else [*words]
    return {"enum": legal, "description": description} | _default(default)


def _number(
    description: str,
    default: float | None = None,
    *,
    low: float,
    high: float,
    open_low: bool = False,
    open_high: bool = False,
    nullable: bool = True,
) -> _Node:
    node: _Node = {"type": ["number", "null"] if nullable else "number"}
    # JSON has no infinity: a bound there is none.
    if math.isfinite(low):
        node["exclusiveMinimum" if open_low else "minimum"] = low
    if math.isfinite(high):
        node["exclusiveMaximum" if open_high else "maximum"] = high
    return node | {"description": description} | _default(default)


def _nullable(node: _Node, description: str, default: str | None = None) -> _Node:
    return {"anyOf": [node, {"type": "null"}], "description": description} | _default(default)


def _default(value: Any) -> _Node:
    return {} if value is None else {"default": value}
