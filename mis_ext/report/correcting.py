"""The correction of a part, by a whole configuration or by each of its gates."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.normalization import WeightScale
from mis_ext.correction.pipeline import Correction, compute_correction
from mis_ext.correction.plan import Plan, plan_of
from mis_ext.explain.effect import description
from mis_ext.report.part import Part


def correct(part: Part, config: CorrectionConfig) -> Correction:
    """The correction of a part, before any normalisation: keep masks and weights are those of the hook.

    A band that follows a target is as it is written: where it went in a run depends on the rollouts before.
    """
    one = torch.ones(())
    return compute_correction(
        proximal_logprobs_T=part.streams.proximal_logprobs_T,
        behavior_logprobs_T=part.streams.behavior_logprobs_T,
        response_mask_R=part.streams.response_mask_R,
        layout=part.streams.layout,
        config=_plan(config),
        rollout_scale=WeightScale(one, one),
        band_scales_N=torch.ones(len(config.adapted_gates)),
    )


def kept_by(part: Part, config: CorrectionConfig) -> Tensor:
    """What a configuration of one gate keeps ``[T]``; other configurations of this part may have the same gate."""
    if config not in part.kept_by:
        part.kept_by[config] = correct(part, config).keep_mask_T
    return part.kept_by[config]


@functools.lru_cache(maxsize=128)
def _plan(config: CorrectionConfig) -> Plan:
    return plan_of(config.replace(metrics=(), scope="rollout"))


@functools.lru_cache(maxsize=128)
def named_gates(config: CorrectionConfig) -> dict[str, CorrectionConfig]:
    """Each gate that takes something out of the mask, as a configuration of its own.

    A gate that looks at what another one leaves takes that one with it.
    """
    labelled = config.labelled_gates
    found: dict[str, CorrectionConfig] = {}
    implied = config.weight.gate if config.weight is not None else None
    if implied is not None:
        found[description("weight", implied)] = CorrectionConfig(weight=None, gates=(implied,))
    for name, gate in labelled.items():
        if gate.action == "reject":
            gates = (gate,) if gate.after is None else (labelled[gate.after], gate)
            found[description(name, gate)] = CorrectionConfig(weight=None, gates=gates)
    return found
