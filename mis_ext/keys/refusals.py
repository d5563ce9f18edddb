# SPDX-License-Identifier: Apache-2.0
"""Refused combinations: keys that have no effect with the others, and keys that contradict each other.

The legal values of a single key are in ``rows``, combinations of the full policy loss in ``loss_refusals``, which the
hook does not load. ``check_setup`` refuses what needs the launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from mis_ext.correction.config import BOUNDS, CorrectionConfig
from mis_ext.correction.tokens import LAG
from mis_ext.keys.names import TIS_OF_FRAMEWORKS
from mis_ext.keys.rows import CORRECTION_ROWS, LOSS_ROWS, VETOES
from mis_ext.validation import Errors

if TYPE_CHECKING:
    from mis_ext.keys.group_keys import GroupConfig
    from mis_ext.keys.loss_keys import WholeLoss

# --- keys without effect


class KeysInUse:
    """The keys of a configuration, with what decides whether one of them has an effect.

    Attributes:
        given: The keys that are set.
        values: The value or default of every key of a correction.
        corrects: The correction is applied.
        measures: Its metrics are computed.
        method_rejects: The method of the loss has a mask.
        loses_tokens: The correction can keep a part of a response.
        bound: The row of the weight's mode; None without a weight.
        rejects: Tokens with a ratio can leave the mask.
        low, high: The weight uses this bound, or a filter without its own does.
        is_repeated: The filter of ``use_rs`` equals that of the weight's mode.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        *,
        corrects: bool,
        measures: bool = True,
        method_rejects: bool = False,
        loses_tokens: bool = True,
    ) -> None:
        self.given = {key: value for key, value in given.items() if value is not None}
        self.values = values = {key: row.default for key, row in CORRECTION_ROWS.items()} | self.given
        self.corrects, self.measures = corrects, measures
        self.method_rejects, self.loses_tokens = method_rejects, loses_tokens
        bound = self.bound = None if values["tis_level"] == "none" else BOUNDS[values["tis_mode"]]
        mode_rejects = bound is not None and bound.rejects
        has_gate = any(key in self.given for key in (*VETOES, "rs_max_staleness"))
        self.rejects: bool = has_gate or values["use_rs"] or mode_rejects
        has_band = values["use_rs"] and values["rs_level"] != "none"
        gate_low, gate_high = (has_band and f"rs_{side}_bound" not in self.given for side in ("lower", "upper"))
        self.low: bool = gate_low or (bound is not None and bound.has_low)
        # The lower bound is 1 by the upper one.
        follows = self.low and "tis_lower_bound" not in self.given
        self.high: bool = follows or gate_high or (bound is not None and bound.has_high)
        is_alike = values["rs_level"] == values["tis_level"] and "rs_gates" not in self.given
        self.is_repeated: bool = mode_rejects and is_alike and gate_low and gate_high

    def reports(self, *words: str) -> bool:
        """Return True if a metric with one of these words in its name is reported."""
        names = self.values["mis_metrics"]
        return isinstance(names, str) or any(word in name for name in names for word in words)

    @property
    def looks_at_lag(self) -> bool:
        """Return True if a metric, the weight, or a filter uses the lag."""
        of_gates = any(gate.get("statistic") == "lag" for gate in self.given.get("rs_gates", ()))
        is_judged = "rs_max_staleness" in self.given or self.values["tis_when"] == "stale" or of_gates
        return is_judged or self.reports("lag_", "fresh", "stale")


class Idle(NamedTuple):
    """Keys without effect if ``when`` holds, at the value ``at`` or at any. ``because`` is the reason."""

    keys: tuple[str, ...]
    when: Callable[[KeysInUse], bool]
    because: str
    advice: str = "remove it"
    at: Any = None


REPORTED = ("mis_staleness", "mis_metrics", "mis_metric_max", "mis_guard", "mis_compile")
"""Keys of what is measured and watched."""
APPLIED = tuple(key for key in CORRECTION_ROWS if key not in (*REPORTED, "use_tis"))
"""Keys of what changes weights and masks."""
_OF_RS = ("rs_level", "rs_lower_bound", "rs_upper_bound")
_ON, _ON_RS = "set use_tis: true (the flag --use-tis), or remove it", "set use_rs: true, or remove it"
_ON_GATES = "set use_rs: true, with rs_level: none for these gates alone, or remove it"
_NO_BOUND, _NO_MEAN = "no weight and no gate has this bound", "tis_batch_normalize is not set"
_NO_LAG = "mis_metrics has none of its metrics, and neither weight nor gate looks at the lag"
_NO_VETO = "rs_veto_requires_rs is true and use_rs is not set"
_ALL_KEPT = "nothing rejects a token, so that all are kept"
_NONE_PARTLY = "no response keeps some of its tokens and loses others"
IDLE = (
    Idle(APPLIED, lambda keys: not keys.corrects, "use_tis is not true", _ON),
    Idle(REPORTED, lambda keys: not keys.measures, "neither use_tis nor get_mismatch_metrics is true", _ON),
    Idle(("mis_staleness",), lambda keys: not keys.looks_at_lag, _NO_LAG),
    Idle(("mis_metric_max",), lambda keys: not keys.reports("k3_kl", "chi2_"), "mis_metrics has no k3_kl and no chi2"),
    Idle(("tis_mode", "tis_when", "tis_batch_normalize"), lambda keys: keys.bound is None, "tis_level is none"),
    # Existing files carry a lower bound with truncate, which warns.
    Idle(("tis_lower_bound",), lambda keys: not keys.low and not (keys.bound and keys.bound.has_high), _NO_BOUND),
    Idle(("tis_upper_bound",), lambda keys: not keys.high, _NO_BOUND),
    Idle(("tis_normalize_over",), lambda keys: "tis_batch_normalize" not in keys.given, _NO_MEAN),
    Idle(
        ("tis_normalize_scope",),
        lambda keys: "tis_batch_normalize" not in keys.given and keys.values["mis_denominator"] != "kept",
        _NO_MEAN,
    ),
    Idle(("use_rs",), lambda keys: keys.is_repeated, "tis_mode rejects the same tokens"),
    Idle(_OF_RS, lambda keys: "use_rs" not in keys.given, "use_rs is not set", _ON_RS),
    Idle(("rs_gates",), lambda keys: "use_rs" not in keys.given, "use_rs is not set", _ON_GATES),
    Idle(("rs_lower_bound", "rs_upper_bound"), lambda keys: keys.values["rs_level"] == "none", "rs_level is none"),
    Idle(
        (*VETOES,),
        lambda keys: keys.values["rs_veto_requires_rs"] and "use_rs" not in keys.given,
        _NO_VETO,
        "set use_rs: true, or remove rs_veto_requires_rs",
    ),
    Idle(("rs_veto_requires_rs",), lambda keys: not keys.given.keys() & {*VETOES}, "no veto is set"),
    Idle(("rs_staleness_level",), lambda keys: "rs_max_staleness" not in keys.given, "rs_max_staleness is not set"),
    Idle(
        ("mis_loss_entropy_tokens", "mis_loss_kl_tokens"),
        lambda keys: not (keys.method_rejects or (keys.corrects and keys.rejects)),
        _ALL_KEPT,
        at="all",
    ),
    Idle(("mis_loss_denominator",), lambda keys: not (keys.corrects and keys.loses_tokens), _NONE_PARTLY, at="kept"),
    Idle(("tis_normalize_over",), lambda keys: not keys.rejects, _ALL_KEPT, at="valid"),
)
"""A key that is false is never refused."""


def refuse_idle_keys(keys: KeysInUse) -> None:
    """Refuse keys that have no effect.

    Raises:
        ValueError: There are such keys; the message has the reason, and what to write.
    """
    wrong, named = Errors(), set[str]()
    for row in IDLE:
        given = {key: keys.given[key] for key in row.keys if key in keys.given and key not in named}
        idle = {key: value for key, value in given.items() if value is not False and row.at in (None, value)}
        if idle and row.when(keys):
            named |= idle.keys()
            with wrong:
                shown = ", ".join(f"{key}={value!r}" for key, value in idle.items())
                raise ValueError(f"{shown}: no effect, because {row.because}; {row.advice}")
    wrong.raise_all()


# --- keys and flags that contradict each other


def refuse_first(reasons: Iterable[str]) -> None:
    """Raise the first reason, if there is one."""
    for reason in reasons:
        raise ValueError(reason)


def against_correction(given: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[str]:
    """Contradictions among the keys of a correction; ``values`` has all of them."""
    low, high = values["tis_lower_bound"], values["tis_upper_bound"]
    bound = None if values["tis_level"] == "none" else BOUNDS[values["tis_mode"]]
    if bound is not None and bound.has_high and high == math.inf:
        yield "tis_upper_bound must be in (0, inf), got inf; write tis_mode: unbounded for no bound"
    if bound is not None and bound.has_low and low >= high:
        yield _disorder(given, "tis", low, high)
    if values["use_rs"] and values["rs_level"] == "none" and not values["rs_gates"]:
        yield "rs_level: none needs rs_gates; write use_rs: false for no gate"
    if values["use_rs"] and values["rs_level"] != "none":
        low, high = values["rs_lower_bound"], values["rs_upper_bound"]
        if low >= high:
            yield _disorder(given, "rs", low, high)
        if low == 0.0 and high == math.inf:
            yield "use_rs: rs_lower_bound=0 and rs_upper_bound=inf reject nothing"
    is_of_stale = values["rs_max_staleness"] is not None or values["tis_when"] == "stale"
    if not values["mis_staleness"] and (is_of_stale or any(gate.statistic == LAG for gate in values["rs_gates"])):
        yield (
            "rs_max_staleness, tis_when: stale, and a gate on the lag need mis_staleness: true, with which the rollout "
            "stores the version of each token"
        )


def _disorder(given: Mapping[str, Any], prefix: str, low: float, high: float) -> str:
    default = "" if f"{prefix}_lower_bound" in given else " (from tis_lower_bound, by default 1 / tis_upper_bound)"
    return f"{prefix}_lower_bound must be below {prefix}_upper_bound, got {low!r}{default} and {high!r}"


def against_built_in_bounds(given: Mapping[str, Any]) -> Iterator[str]:
    """Bounds of the framework's built-in correction, which mis_ext replaces."""
    for key, (default, instead) in TIS_OF_FRAMEWORKS.items():
        if given.get(key) not in (None, default):
            yield (
                f"{key}={given[key]!r}: no effect, because it belongs to the framework's built-in correction; write "
                f"{instead}"
            )


def refuse_loss_keys(given: Mapping[str, Any]) -> None:
    """Refuse keys of the full policy loss where the framework's own loss runs."""
    idle = [key for key in LOSS_ROWS if given.get(key) is not None]
    if idle:
        raise ValueError(
            f"{', '.join(idle)}: no effect, because --loss-type is {given.get('loss_type') or 'policy_loss'}; write "
            "--loss-type custom_loss --custom-loss-function-path mis_ext.policy_loss"
        )


def refuse_group_keys(keys: Collection[str]) -> None:
    """Refuse keys that only a function of the whole rollout reads."""
    if keys:
        raise ValueError(
            f"{', '.join(keys)}: no effect here: slime and Miles alone show mis_ext the responses to a prompt; compute "
            "advantages with mis_ext.group_advantages, and give the loss divisors"
        )


def refuse_combinations(given: Mapping[str, Any], correction: CorrectionConfig, loss: WholeLoss | None) -> None:
    """Refuse what keys and flags of a whole run cannot be together."""
    if given.get("loss_type") not in (None, "custom_loss"):
        refuse_loss_keys(given)
    if loss is not None:
        method = loss.settings.method
        refuse_idle_keys(
            KeysInUse(
                {key: given.get(key) for key in (*APPLIED, *REPORTED, *LOSS_ROWS)},
                corrects=given.get("use_tis") is True,
                measures=loss.has_correction,
                method_rejects=method is not None and any(each.action == "reject" for each in method.method.factors),
                loses_tokens=correction.rejects_single_tokens,
            )
        )
    refuse_first(_against_fsdp(given, correction, loss))


def _against_fsdp(given: Mapping[str, Any], correction: CorrectionConfig, loss: WholeLoss | None) -> Iterator[str]:
    if given.get("train_backend") != "fsdp":
        return
    if correction.denominator == "kept":
        yield (
            "mis_denominator: kept with Miles' FSDP backend corrects twice: its reducer divides by the returned masks; "
            "remove mis_denominator"
        )
    rejects = any(gate.action == "reject" for gate in correction.all_gates.values())
    if loss is not None and loss.has_correction and rejects:
        yield (
            "train_backend: fsdp with a configuration that rejects: Miles' FSDP backend divides every term by the kept "
            "tokens, the loss of mis_ext by the original ones; write action: zero for the gates, or keep the "
            "framework's loss with --custom-tis-function-path mis_ext.compute_mis_weights_with_cp"
        )


def double_correction(given: Mapping[str, Any], correction: CorrectionConfig, loss: WholeLoss | None) -> str | None:
    """Why loss and correction together count the mismatch twice, or None. A guard: the user can allow it."""
    if given.get("mis_loss_method") is not None:
        chosen = None if loss is None or not loss.has_correction else loss.settings.method
        if chosen is None or correction.weight is None or not chosen.method.weighs_behavior:
            return None
        return (
            f"mis_loss_method: {chosen.name} already corrects for the behavior policy: a weight of the correction "
            "counts the mismatch twice; write tis_level: none for gates and vetoes alone, or use_tis: false with "
            "--get-mismatch-metrics to measure only"
        )
    # The other modes of the loss do not count it twice, and say so where they are computed.
    is_baseline = given.get("mis_loss_mode") in (None, "baseline") and given.get("mis_loss_proximal") != "current"
    if correction.metrics_only or not is_baseline or not given.get("use_rollout_logprobs"):
        return None
    return (
        "--use-tis together with --use-rollout-logprobs counts the mismatch twice: with the behavior log-probs as PPO "
        "denominator the ratio already corrects it; drop one of the two (also use_tis in the YAML)"
    )


def doubts(given: Mapping[str, Any], correction: CorrectionConfig, group: GroupConfig | None) -> Iterator[str]:
    """Warnings about functions of the user that may leave something out, and about the schedule of weight updates."""
    generates, interval = given.get("custom_generate_function_path"), given.get("update_weights_interval") or 1
    is_foreign = given.get("rollout_data_postprocess_path") is None and not _is_ours(generates or "mis_ext.")
    if correction.denominator == "kept" and is_foreign:
        yield (
            f"mis_denominator: kept is wrong if {generates} makes several samples of a rollout; "
            "--rollout-data-postprocess-path mis_ext.prepare_rollout refuses them"
        )
    if correction.staleness and interval > 1:
        yield (
            f"--update-weights-interval {interval}: the trainer is up to {interval - 1} rollouts ahead of the newest "
            "version, and a lag of 0 does not mean current weights"
        )
    keys, asked = given.get("on_policy_tokens"), []
    if isinstance(keys, Mapping) and keys and not given.get("load_debug_rollout_data"):
        # The function checks it.
        what = f"on_policy_tokens ({', '.join(map(str, keys))})"
        asked.append((what, "custom_generate_function_path", "mis_ext.rollout.generate"))
    if group is not None and group.needs_rollout:
        asked.append((group.needs_rollout, "rollout_data_postprocess_path", "mis_ext.prepare_rollout"))
    if group is not None and group.of_rewards and group.over != "kept":
        asked.append((group.of_rewards, "custom_reward_post_process_path", "mis_ext.group_rewards"))
    for what, argument, function in asked:
        path, flag = given.get(argument), f"--{argument.replace('_', '-')}"
        if path is None and argument in given:
            yield f"{what} does nothing unless a function of yours calls {function}: {flag} is not set"
        elif path is not None and not _is_ours(path):
            yield f"{what} does nothing unless {flag} {path} calls {function}"


def _is_ours(path: Any) -> bool:
    return str(path).startswith("mis_ext.")
