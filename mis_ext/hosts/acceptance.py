# SPDX-License-Identifier: Apache-2.0
"""Bounds from a target acceptance rate: a closed loop with one step per rollout.

A gate with a ``target_accept`` keeps the shape of its band and scales it about the on-policy value: for a ratio,
``[low ** scale, high ** scale]``. Of a rollout, ``needed`` is the smallest scale at which at least the target passes,
an exact order statistic over all ranks. A step goes there by the gate's ``target_gain``, in the log:

``scale <- scale ** (1 - gain) * needed ** gain``

With gain 1 every rollout meets the target, a broken one too. With less, the error of a steady mismatch falls by
``1 - gain`` a rollout, and a sudden burst still meets the bounds that were right before it.

References:
    Bounds as quantiles of a batch: AC-MIS-PO, a replication of MIS-PO (Step-3.5-Flash, arXiv:2602.10604). The loop, its
    gain and the scaled band are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.collectives import covering_value
from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.formula import NamedValues
from mis_ext.correction.gates import Gate
from mis_ext.correction.log_ratio import PackedStreams
from mis_ext.correction.pipeline import Correction
from mis_ext.correction.statistics import LAG, TOKEN_FORMULAS
from mis_ext.hosts.groups import Groups
from mis_ext.validation import check_known, check_mapping, check_number

SCALE_RANGE = (1e-3, 1e3)
"""A band is never made a thousand times narrower or wider than it is written."""

_LARGER = 1.0 + 1e-6
"""The scale that is needed was rounded: the value that it came from must lie inside."""


class AcceptanceLoop:
    """The scales of a configuration's bands, 1 before the first rollout.

    Equal on all ranks, because each takes part in every step.
    """

    def __init__(self, config: CorrectionConfig) -> None:
        self._gates = config.adapted_gates
        self.is_needed = bool(self._gates)
        self._scales = dict.fromkeys(self._gates, 1.0)
        self._num_rollouts = 0
        self._on_device: dict[torch.device, Tensor] = {}

    def scales_on(self, device: torch.device) -> Tensor | None:
        """``[N]``, as :func:`~mis_ext.correction.pipeline.compute_correction` takes them; None before any rollout."""
        if not self.is_needed or self._num_rollouts == 0:
            return None
        if device not in self._on_device:
            self._on_device[device] = torch.tensor([*self._scales.values()], dtype=torch.float32, device=device)
        return self._on_device[device]

    def bounds(self) -> dict[str, tuple[float, float]]:
        """The bounds of today by the name of their gate, as they would be written; open sides are infinite."""
        found = {}
        for name, gate in self._gates.items():
            edges = (gate.log_low * self._scales[name], gate.log_high * self._scales[name])
            found[str(gate.name)] = (math.exp(edges[0]), math.exp(edges[1])) if gate.row.is_log else edges
        return found

    def needed_scales(self, correction: Correction, streams: PackedStreams, *, groups: Groups) -> Tensor:
        """``[N]``: the smallest scale of each band at which its target passes now; NaN where nothing counts."""
        tokens = streams.tokens
        leaves = {"log_ratio": tokens.log_ratio_T, "proximal": tokens.proximal_T, "behavior": tokens.behavior_T}
        if streams.lag_T is not None:
            leaves[LAG] = streams.known_lag_T
        of_tokens = NamedValues(leaves, TOKEN_FORMULAS)
        needed = []
        for gate in self._gates.values():
            is_of_tokens = gate.reduce == "token"
            value = (of_tokens if is_of_tokens else correction.sequences).compute(gate.value)
            assert gate.target_accept is not None
            scale = covering_value(
                _needed_scale(gate, value),
                tokens.valid_mask_T if is_of_tokens else _has_value(gate, correction.sequences),
                share=gate.target_accept,
                # Every context-parallel rank knows every sequence.
                groups=(groups.cp_group, groups.dp_group) if is_of_tokens else (groups.dp_group,),
            )
            needed.append(scale)
        return torch.stack(needed)

    def move(self, needed_N: Tensor) -> None:
        """One step towards what a rollout needed; it reads the numbers."""
        for (name, gate), needed in zip(self._gates.items(), needed_N.tolist(), strict=True):
            if not math.isnan(needed):
                self._scales[name] = _moved(self._scales[name], needed, gate.target_gain)
        self._restart(self._num_rollouts + 1)
        # Sent now, so that no micro-batch waits for it.
        self.scales_on(needed_N.device)

    def state_dict(self) -> dict[str, Any]:
        """Numbers for a checkpoint, the same on every rank."""
        scales = {str(gate.name): self._scales[name] for name, gate in self._gates.items()}
        return {"scales": scales, "num_rollouts": self._num_rollouts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; of gates with other bounds it is the factor that is kept."""
        check_known("entries of the state", state, ("scales", "num_rollouts"))
        scales = check_mapping("scales", state["scales"])
        names = {str(gate.name): name for name, gate in self._gates.items()}
        if {*scales} != {*names}:
            raise ValueError(
                f"the state has scales of {', '.join(scales) or 'no gate'}, the configuration has targets for "
                f"{', '.join(names) or 'no gate'}"
            )
        low, high = SCALE_RANGE
        self._scales = {
            name: check_number(f"scales.{label}", scales[label], low=low, high=high) for label, name in names.items()
        }
        self._restart(int(check_number("num_rollouts", state["num_rollouts"], low=0, high=math.inf, open_high=True)))

    def _restart(self, num_rollouts: int) -> None:
        self._num_rollouts = num_rollouts
        self._on_device.clear()


def _has_value(gate: Gate, sequences: NamedValues) -> Tensor:
    """``[S]``: the sequences that pass at some scale; a veto that a token without a ratio fails, it fails at every."""
    usable_S: Tensor = sequences["usable"]
    return usable_S & (sequences["num_valid"] == sequences["num_response"]) if gate.is_veto else usable_S


def _needed_scale(gate: Gate, value: Tensor) -> Tensor:
    """The smallest scale at which a statistic lies in the band."""
    sides = [value / edge for edge in (gate.log_low, gate.log_high) if math.isfinite(edge)]
    needed = sides[0] if len(sides) == 1 else torch.maximum(*sides)
    return needed.float().clamp_min(0.0)


def _moved(scale: float, needed: float, gain: float) -> float:
    low, high = SCALE_RANGE
    log_scale = (1.0 - gain) * math.log(scale) + gain * math.log(min(max(needed, low), high))
    return min(max(math.exp(log_scale) * _LARGER, low), high)
