# SPDX-License-Identifier: Apache-2.0
"""The standard deviation of weights that are close to each other and not to 1, on one rank and on many."""

import math

import pytest
import torch
from thread_ranks import Rank, run_ranks

from mis_ext import CorrectionConfig, PackedLayout, PackedStreams, Session, Weight

# Geometric means are near 1, where a float32 is off by at most 2^-24: no weight is known better.
ROUNDING = 2.0**-24
WEIGHTS = {
    "unbounded": Weight(level="geometric", mode="unbounded"),
    "clip": Weight(level="geometric", mode="clip", low=0.9, high=1.0101),
}


def rollout(num: int, *, shift: float, noise: float, length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs ``[num, length]`` of both engines, which differ by a constant and by noise of each response."""
    generator = torch.Generator().manual_seed(num)
    behavior = -1.0 - torch.randint(1, 256, (num, length), generator=generator) / 64
    return behavior + shift + noise * torch.randn(num, 1, generator=generator), behavior


def streams(proximal: torch.Tensor, behavior: torch.Tensor) -> PackedStreams:
    lengths = [proximal.shape[1]] * len(proximal)
    return PackedStreams(
        proximal.flatten(), behavior.flatten(), torch.ones(proximal.numel()), PackedLayout.whole(lengths)
    )


def in_float64(weight: Weight, proximal: torch.Tensor, behavior: torch.Tensor) -> float:
    weights = (proximal - behavior).double().mean(1).exp()
    return float(weights.clamp(weight.low or 0.0, weight.high or math.inf).std(correction=0))


def found(weight: Weight, given: PackedStreams, *, rank: Rank | None = None) -> float:
    session = Session(CorrectionConfig(weight=weight, metrics=("mis_tis_weight_std",), warn_only=frozenset()))
    correction = session.compute(given, groups=rank.groups) if rank else session.correct(given)
    return float(correction.metrics["mis_tis_weight_std"].value())


SPREADS = [(0.0, 1e-4), (0.01, 1e-4), (0.01, 1e-2), (0.2, 1e-3)]


@pytest.mark.parametrize(("shift", "noise", "mode"), [(*spread, mode) for spread in SPREADS for mode in WEIGHTS])
def test_weights_that_are_close_to_each_other_keep_their_digits(shift, noise, mode) -> None:
    pair = rollout(24, shift=shift, noise=noise)
    wanted = in_float64(WEIGHTS[mode], *pair)
    assert found(WEIGHTS[mode], streams(*pair)) == pytest.approx(wanted, rel=1e-6, abs=2 * ROUNDING)


@pytest.mark.parametrize("sizes", [(24,), (9, 15), (20, 0, 4)])
def test_it_is_merged_over_ranks_as_if_one_had_all_weights(sizes) -> None:
    # Each rank has another mean.
    proximal, behavior = rollout(24, shift=0.2, noise=1e-3)
    proximal[:9] += 2e-3
    edges = torch.tensor([0, *sizes]).cumsum(0).tolist()

    def work(rank: Rank) -> float:
        mine = slice(edges[rank.dp_rank], edges[rank.dp_rank + 1])
        return found(WEIGHTS["unbounded"], streams(proximal[mine], behavior[mine]), rank=rank)

    wanted = in_float64(WEIGHTS["unbounded"], proximal, behavior)
    values = run_ranks(work, dp_size=len(sizes))
    assert values == [pytest.approx(wanted, rel=1e-6, abs=2 * ROUNDING)] * len(sizes)
    assert len({*values}) == 1


def test_of_tokens_it_is_that_within_and_between_the_sequences() -> None:
    # Weights 3, 3, 3 and 2, 1: a mean of 2.4, squared distances of 3 * 0.36 + 0.16 + 1.96 = 3.2 in all.
    behavior = -torch.ones(5)
    proximal = behavior + torch.tensor([3.0, 3.0, 3.0, 2.0, 1.0]).log()
    given = PackedStreams(proximal, behavior, torch.ones(5), PackedLayout.whole([3, 2]))
    assert found(Weight(mode="unbounded"), given) == pytest.approx(math.sqrt(3.2 / 5), rel=1e-6)


def test_equal_weights_of_tokens_have_no_spread() -> None:
    # Squares of w - 1 in float32 are off by 6e-8 of them, which would read as a deviation of 5e-5.
    behavior = torch.linspace(-3.0, -1.0, 600)
    given = PackedStreams(behavior + 0.5, behavior, torch.ones(600), PackedLayout.whole([400, 200]))
    assert found(Weight(high=1.3), given) == pytest.approx(0.0, abs=1e-7)
