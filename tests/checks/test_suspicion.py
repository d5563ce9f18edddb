# SPDX-License-Identifier: Apache-2.0
"""Guards load the rules of the diagnosis only where sums over tokens are suspicious: no cause may be missed by that."""

import math

import plants
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plants import SINGLE, planted

from mis_ext.checks.token_sums import SUSPICIOUS_LINE, TokenSums, are_suspicious, token_sums
from mis_ext.tools.diagnosis import CAUSES, Measured, diagnose
from mis_ext.tools.diagnosis.sampling import EXPLAINED, MIN_EXPLAINED
from mis_ext.tools.report import Part


def sums_of(proximal: list[torch.Tensor], behavior: list[torch.Tensor], masks=None) -> TokenSums:
    streams = Part.of_lists(proximal=proximal, behavior=behavior, masks=masks).streams
    numbers = token_sums(streams.tokens, response_mask_R=streams.response_mask_R, layout=streams.layout)
    return TokenSums.of(numbers.tolist())


BY_TOKENS = [name for name, (cause, _) in SINGLE.items() if CAUSES[cause].needs == ("tokens",)]


@pytest.mark.parametrize("plant", BY_TOKENS)
def test_each_cause_that_guards_can_name_is_suspicious(plant) -> None:
    tokens = SINGLE[plant][1](0)
    sums = sums_of(tokens.proximal, tokens.behavior, tokens.masks)
    assert diagnose(Measured(tokens=sums))
    assert are_suspicious(sums)


@pytest.mark.parametrize("change", [None, plants.quantised, plants.experts])
def test_healthy_engines_are_not(change) -> None:
    tokens = planted(0, [] if change is None else [change])
    assert not are_suspicious(sums_of(tokens.proximal, tokens.behavior))


def test_a_line_is_suspicious_before_a_rule_looks_at_it() -> None:
    assert min(MIN_EXPLAINED, EXPLAINED) >= SUSPICIOUS_LINE


SPOILED = {
    "healthy": lambda x: x,
    "shifted": lambda x: x.roll(1),
    "negated": torch.neg,
    "scaled": lambda x: 1.15 * x,
    "base 10": lambda x: x / math.log(10.0),
    "moved": lambda x: x + 0.4,
    "lower": lambda x: x - 0.4,
    "constant": lambda x: torch.full_like(x, -1.0),
    "clamped": lambda x: x.clamp_min(-1.0),
    "zeros": torch.zeros_like,
    "probabilities": torch.exp,
    "placeholder": lambda x: torch.cat([x[:1] * 0.0 - 9999.0, x[1:]]),
    "another": lambda x: x.flip(0),
    "far": lambda x: x - 12.0,
}


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.sampled_from(["behavior", "proximal"]),
    st.lists(st.sampled_from([*SPOILED]), min_size=8, max_size=8),
    st.sampled_from([0.0, 1e-3, 0.05, 0.5]),
)
def test_where_nothing_is_suspicious_no_rule_of_tokens_finds_a_cause(seed, lengths, side, spoilers, noise) -> None:
    generator = torch.Generator().manual_seed(seed)
    sides = {"proximal": [], "behavior": []}
    for length, spoiler in zip(lengths, spoilers, strict=False):
        log_probs = -3.0 * torch.rand(length, generator=generator) ** 2
        noisy = (log_probs + noise * torch.randn(length, generator=generator)).clamp_max(0.0)
        other = "proximal" if side == "behavior" else "behavior"
        sides[other].append(log_probs)
        sides[side].append(SPOILED[spoiler](noisy))
    sums = sums_of(sides["proximal"], sides["behavior"])
    assert are_suspicious(sums) or not diagnose(Measured(tokens=sums))
