# SPDX-License-Identifier: Apache-2.0
"""Recommend a configuration with reasons: candidates, their pitfalls on the data, and a ranking."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mis_ext.correction.config import CorrectionConfig
from mis_ext.files import list_presets, preset_path
from mis_ext.loss.objective import objective_of
from mis_ext.methods.catalogue import find_method
from mis_ext.methods.first_update import equivalent_correction, without_terms
from mis_ext.methods.method import Method
from mis_ext.tools.configuration_files import NO_CORRECTION, Configuration, method_yaml, read_file, read_method
from mis_ext.tools.diagnosis.cause import Diagnosis
from mis_ext.tools.diagnosis.table import CAUSES
from mis_ext.tools.diagnosis.thresholds import MAIN_SHARE, PRETRAINED_K3
from mis_ext.tools.explain import (
    COST_OF_GATES,
    FEW_SEQUENCES_ESS,
    HARMLESS_K3,
    Circumstances,
    gates_sequences,
    traps_of,
)
from mis_ext.tools.report.summary import Summary
from mis_ext.tools.report.what_if import Outcome

NONE = "none"
"""Name of "no correction" in a ranking."""

HARMLESS_ESS = 0.99


@dataclass(frozen=True)
class Candidate:
    """A configuration to evaluate, its file, and the warnings from reading it.

    ``method``: the published method of a full policy loss, which uses this configuration; else None.
    """

    name: str
    config: CorrectionConfig
    yaml: str
    said: tuple[str, ...] = ()
    method: Method | None = None


def no_correction() -> Candidate:
    """Return the candidate that measures and changes nothing."""
    return Candidate(NONE, NO_CORRECTION, "")


def preset_candidates(names: Iterable[str] | None = None) -> list[Candidate]:
    """Return presets by name; by default all that correct, without duplicates."""
    found: list[Candidate] = []
    # The default comes first, so that its name is shown if another preset is equal.
    for name in sorted(list_presets(), key=lambda name: name != "mis") if names is None else names:
        candidate = dataclasses.replace(file_candidate(preset_path(name)), name=name)
        is_new = all(candidate.config != other.config for other in found)
        if names is not None or (is_new and not candidate.config.metrics_only):
            found.append(candidate)
    return found


def file_candidate(path: Path) -> Candidate:
    """Return the candidate of a YAML file, with the warnings from reading it."""
    return _candidate(str(path), read_file(path), path.read_text(encoding="utf-8"))


def method_candidate(name: str) -> Candidate:
    """Return the candidate of a published method with its defaults, with the file that runs it."""
    row = find_method(name)
    return _candidate(f"method {name}", read_method(row), method_yaml(row))


def _candidate(name: str, found: Configuration, yaml: str) -> Candidate:
    if found.loss is None or found.loss.method is None:
        return Candidate(name, found.config, yaml, found.said)
    method = objective_of(found.loss).method
    if "reference" in method.policies:
        raise ValueError(f"{name} needs log-probs of the reference policy, which a dump does not have")
    if method.needs_state_values:
        raise ValueError(f"{name} needs state values, which a dump does not have")
    # If the hook can express the method, use the hook's exact numbers, gate names, and pitfalls.
    config = equivalent_correction(found.config, method)
    if config is not None:
        return Candidate(name, config, yaml, found.said)
    return Candidate(name, found.config, yaml, found.said, method)


@dataclass(frozen=True)
class Ranked:
    """A candidate in the ranking: outcome, pitfalls (``warnings``; their names are ``traps``), and notes."""

    name: str
    outcome: Outcome
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    traps: tuple[str, ...]


@dataclass(frozen=True)
class Recommendation:
    """Recommendation for the mismatch of a run: texts, YAML, and the ranking.

    Attributes:
        headline: One sentence.
        reasons: Sentences.
        name: The recommended configuration, ``none`` for no correction.
        yaml: Its file; empty for no correction, or if a fault must be fixed first.
        ranking: All candidates, best first.
    """

    headline: str
    reasons: tuple[str, ...]
    name: str
    yaml: str
    ranking: tuple[Ranked, ...] = field(repr=False)


def recommend(
    candidates: Iterable[Candidate],
    outcomes: Mapping[str, Outcome],
    summary: Summary,
    diagnoses: Sequence[Diagnosis],
) -> Recommendation:
    """Rank the candidates and recommend one.

    The order of the criteria: the number of pitfalls on this data, results of training runs for this kind of
    configuration, and the remaining mismatch.
    """
    candidates = [*candidates]
    faults = [each for each in diagnoses if each.is_fault and not each.is_of_few_tokens]
    is_stale = any(diagnosis.cause == "stale_weights" for diagnosis in diagnoses)
    is_harmless = summary.overall.k3 < HARMLESS_K3 and summary.overall.ess_token > HARMLESS_ESS
    is_needed = bool(faults) or is_stale or not is_harmless
    ranked = []
    for candidate in candidates:
        outcome = outcomes[candidate.name]
        config, method = candidate.config, candidate.method
        traps = [*traps_of(config, circumstances_of(outcome, summary, is_stale=is_stale), method)]
        each = Ranked(
            candidate.name,
            outcome,
            warnings=tuple(trap.text for trap in traps),
            notes=(*candidate.said, *_notes(config, method, outcome)),
            traps=tuple(trap.name for trap in traps),
        )
        left = math.inf if math.isnan(outcome.residual) else outcome.residual
        ranked.append(((len(each.warnings), _place(config, method, is_needed=is_needed), left), each))
    ranking = tuple(each for _, each in sorted(ranked, key=lambda pair: pair[0]))
    best = ranking[0].name if ranking else NONE
    yaml = next((candidate.yaml for candidate in candidates if candidate.name == best and not faults), "")
    found = [each for each in diagnoses if not each.is_of_few_tokens]
    headline, reasons = _in_words(best, summary, faults, found, is_stale=is_stale, is_needed=is_needed)
    return Recommendation(headline, reasons, best, yaml, ranking)


def circumstances_of(outcome: Outcome, summary: Summary, *, is_stale: bool = False) -> Circumstances:
    """Collect the measurements of a run and of a configuration on it."""
    overall = summary.overall
    return Circumstances(
        k3=overall.k3,
        length=overall.mean_length,
        ess_sequence=overall.ess_sequence,
        k_hat=overall.k_hat,
        kept_tokens=outcome.kept_tokens,
        kept_sequences=outcome.kept_sequences,
        learning_rate=outcome.learning_rate,
        is_stale=is_stale,
    )


def _notes(config: CorrectionConfig, method: Method | None, outcome: Outcome) -> Iterator[str]:
    if method is not None:
        # Limits of the numbers at the first update.
        if method.terms:
            yield "the numbers do not include the penalty of the method, because it does not multiply the advantage"
        if method.averages_over_batch or any(reduce.startswith("batch") for reduce in method.reduces):
            yield "the method uses statistics of the batch: here those of the tokens that are evaluated together"
    elif config.metrics_only:
        return
    if config.all_gates and outcome.kept_tokens == 1.0:
        yield "its gates remove no token of this data"
    elif method is None and config.weight is None and outcome.kept_tokens == 1.0:
        yield "it has no effect on this data"
    positive, negative = outcome.removed_positive, outcome.removed_negative
    if max(positive, negative) > 0.01 and max(positive, negative) > 2.0 * min(positive, negative):
        yield (
            f"{positive:.1%} of tokens with a positive advantage have no policy gradient, and {negative:.1%} of those "
            "with a negative one"
        )


def _in_words(
    best: str,
    summary: Summary,
    faults: Sequence[Diagnosis],
    found: Sequence[Diagnosis],
    *,
    is_stale: bool,
    is_needed: bool,
) -> tuple[str, tuple[str, ...]]:
    overall = summary.overall
    size = (
        f"k3 is {overall.k3:.2g} per token, and the effective sample size of token ratios is {overall.ess_token:.2%}."
    )
    if faults:
        return (
            f"Repair this first: {faults[0].title}.",
            (
                _sentence(faults[0].evidence),
                faults[0].advice,
                "No configuration corrects it. The ranking below uses the data as they are.",
                size,
            ),
        )
    grows = next((each for each in found if each.is_growing), None)
    if not is_needed and grows is not None:
        return (f"k3 is small and grows: {grows.title}.", (_sentence(grows.evidence), grows.advice))
    if not is_needed:
        return (
            "No correction is needed.",
            (
                size,
                f"Up to a k3 of {HARMLESS_K3:g} no study of mis_ext found a correction better than none.",
                "Keep measuring with the preset metrics_only. Token TIS (preset mis) does no harm as a precaution.",
            ),
        )
    # First the cause, then the correction. A size is not a cause.
    main = next((each for each in found if each.cause in CAUSES and each.cause != "equal"), None)
    if main is None or main.k3_share < MAIN_SHARE:
        headline, reasons = f"Use {best}." if best != NONE else "No candidate is better than no correction.", [size]
    else:
        headline = f"Find this first: {main.title}."
        until = f"Until then use {best}." if best != NONE else "No candidate corrects it."
        reasons = [_sentence(main.evidence), main.advice, until, size]
    if is_stale:
        reasons.append(
            "In a pretrained model token TIS gained 0.13 of reward at a staleness of 8 steps, 0.06 at 4 steps, and "
            "made no difference at one step. In a tiny model it gained 0.14 at one step, and 0.34 at more. Filters on "
            "sequences with bounds of 1 % lowered the reward there."
        )
    else:
        reasons.append(
            f"With up-to-date weights, token TIS made no difference. {COST_OF_GATES[0].upper()}{COST_OF_GATES[1:]}."
        )
        if overall.k3 >= PRETRAINED_K3:
            reasons.append("At a k3 of 0.03 published runs of a 4B model collapsed without a correction.")
    if overall.ess_sequence < FEW_SEQUENCES_ESS:
        reasons.append(
            f"Sequence-level weights are not usable: their effective sample size is {overall.ess_sequence:.2g} "
            f"at {overall.mean_length:.0f} tokens."
        )
    return headline, tuple(reasons)


def _sentence(text: str) -> str:
    return f"{text}." if text.startswith("k3") else f"{text[0].upper()}{text[1:]}."


def _place(config: CorrectionConfig, method: Method | None, *, is_needed: bool) -> int:
    """The rank of a configuration from training runs of its kind; lower is better."""
    if config.metrics_only and (method is None or "behavior" not in without_terms(method).policies):
        return 2 if is_needed else -1
    if gates_sequences(config) or (method is not None and method.judges_sequences):
        return 4
    has_other_weight = config.weight is not None and config.weight.level != "token"
    if has_other_weight or (method is not None and not method.is_of_tokens):
        return 3
    return 1 if config.all_gates or method is not None else 0
