# SPDX-License-Identifier: Apache-2.0
"""Which behavior log-probs stop a run, which are legitimate, and when a check has seen enough."""

import argparse
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mis_ext
from mis_ext.hosts import guards
from mis_ext.hosts.session import session_for

LOWEST = {
    "-1e9": -1e9,
    "float32 min": torch.finfo(torch.float32).min,
    "bfloat16 min": torch.finfo(torch.bfloat16).min,
}
# Both bound every log-prob by the same number of nats: of the slow one the largest case is enough.
Columns = tuple[list[torch.Tensor], list[torch.Tensor]]
SEEDS = pytest.mark.parametrize("seed", range(3))


def call(proximal: list[torch.Tensor], behavior: list[torch.Tensor], *, args: Any = None, **keys: Any) -> tuple:
    lengths = [each.numel() for each in proximal]
    return mis_ext.compute_mis_weights_with_cp(
        argparse.Namespace(**({"use_tis": True} | keys)) if args is None else args,
        pg_loss=torch.ones(sum(lengths)),
        train_log_probs=proximal,
        rollout_log_probs=behavior,
        loss_masks=[torch.ones(length) for length in lengths],
        total_lengths=[length + 4 for length in lengths],
        response_lengths=lengths,
    )


def draw(seed: int, *, noise: float = 0.005, shortest: int = 20, longest: int = 200) -> Columns:
    """Samples of random numbers and lengths; a few tokens of each are probable, the others less so."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [choose.randint(shortest, longest) for _ in range(choose.randint(2, 8))]
    proximal = [-torch.randn(length, generator=generator).square() - 1e-3 for length in lengths]
    return proximal, [(x + noise * torch.randn(len(x), generator=generator)).clamp_max(0.0) for x in proximal]


# --- one absurd log-prob


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lowest", LOWEST.values(), ids=LOWEST)
@pytest.mark.parametrize("place", [0, 100, 498])
@pytest.mark.parametrize("keys", [{}, {"tis_level": "geometric"}, {"use_rs": True, "rs_veto_upper_threshold": 100.0}])
def test_one_absurd_log_prob_stops_nothing_and_is_the_largest_k3(lowest, place, keys) -> None:
    proximal, behavior = draw(0, shortest=499, longest=499)
    proximal, behavior = [proximal[0][:1], proximal[1]], [torch.tensor([lowest]), behavior[1]]
    keys = keys | {"mis_metrics": "all", "mis_max_reject_fraction": 1.0}
    _, masks, metrics = call(proximal, behavior, **keys)
    assert metrics["mis_k3_kl"][0] == 10.0
    assert metrics["mis_ratio_max"][0] == pytest.approx(math.exp(20.0))
    assert all(values.isfinite().all() for values in metrics.values()), metrics
    if "rs_veto_upper_threshold" in keys:
        assert [mask.mean() for mask in masks] == [0.0, 1.0]
    # And inside a long response, at its ends too.
    proximal, behavior = [proximal[1]], [behavior[1].clone()]
    behavior[0][place] = lowest
    _, _, metrics = call(proximal, behavior, **keys)
    assert 10.0 / 499 <= metrics["mis_k3_kl"][0] < 10.1 / 499


@pytest.mark.parametrize("lowest", LOWEST)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_sum_that_leaves_float32_leaves_every_metric_finite(lowest, level) -> None:
    proximal, behavior = draw(1, shortest=100)
    behavior[0][:3] = LOWEST[lowest]
    _, _, metrics = call(proximal, behavior, mis_metrics="all", tis_level=level, mis_guard="warn")
    assert [name for name, values in metrics.items() if not values.isfinite().all()] == []
    for name in ("mis_logprob_abs_diff", "mis_kl"):
        assert metrics[name][0].abs() == pytest.approx(3e6 / len(proximal[0]), rel=1e-4)
    assert metrics["mis_log_ppl_diff"][0] == -1e6


@pytest.mark.parametrize("lowest", LOWEST.values(), ids=LOWEST)
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_without_a_largest_value_all_metrics_are_finite(lowest, level) -> None:
    proximal, behavior = draw(1)
    behavior[0][3] = lowest
    loss, _, metrics = call(
        proximal, behavior, mis_metrics="all", mis_metric_max=math.inf, tis_level=level, mis_guard="warn"
    )
    assert loss.isfinite().all()
    assert [name for name, values in metrics.items() if not values.isfinite().all()] == []
    assert metrics["mis_k3_kl"][0] == pytest.approx((math.exp(20.0) - 21.0) / len(proximal[0]), rel=1e-5)


# --- degenerate or legitimate


def all_zero(columns: Columns) -> None:
    columns[1][:] = [torch.zeros_like(x) for x in columns[1]]


def all_equal(columns: Columns) -> None:
    columns[1][:] = [torch.full_like(x, -0.7) for x in columns[1]]


def half_zero(columns: Columns) -> None:
    columns[1][::2] = [torch.zeros_like(x) for x in columns[1][::2]]


def one_equal(columns: Columns) -> None:
    columns[1][0] = torch.full_like(columns[1][0], -0.25)


def placeholder(value: float, dtype: torch.dtype = torch.float32) -> Callable[[Columns], None]:
    def spoil(columns: Columns) -> None:
        columns[1][-1] = torch.full_like(columns[1][-1], value)
        columns[1][:] = [x.to(dtype) for x in columns[1]]

    return spoil


MISTAKES = {
    "all 0": all_zero,
    "all equal": all_equal,
    "half of the samples 0": half_zero,
    "one sample equal": one_equal,
    "-9999": placeholder(-9999.0),
    "-9999 in bfloat16": placeholder(-9999.0, torch.bfloat16),
    "-1e9": placeholder(-1e9),
    "-1100": placeholder(-1100.0),
    "float16 min": placeholder(-65504.0, torch.float16),
}


@SEEDS
@pytest.mark.parametrize("spoil", MISTAKES.values(), ids=MISTAKES)
def test_degenerate_log_probs_stop_the_run(spoil, seed) -> None:
    columns = draw(seed)
    spoil(columns)
    with pytest.raises(ValueError, match=r"placeholders.*mis_guard: {degenerate_behavior: warn}"):
        call(*columns)


def both(value: float, count: int, noise: float = 0.0) -> Callable[[torch.Generator], Columns]:
    def build(generator: torch.Generator) -> Columns:
        proximal = value + noise * torch.randn(count, generator=generator)
        return [proximal.clamp_max(0.0)], [torch.full((count,), value)]

    return build


def one_token_answers(value: float, count: int, noise: float) -> Callable[[torch.Generator], Columns]:
    def build(generator: torch.Generator) -> Columns:
        proximal, behavior = both(value, count, noise)(generator)
        return [*proximal[0].split(1)], [*behavior[0].split(1)]

    return build


LEGITIMATE = {
    "both certain": both(0.0, 30),
    "both nearly certain": both(0.0, 500, 0.002),
    "both uniform": both(-math.log(32_000), 200),
    "both uniform, other kernels": both(-math.log(32_000), 200, 0.03),
    "one-token answers": one_token_answers(-0.01, 8, 0.005),
    "many one-token answers": one_token_answers(-0.01, 300, 0.005),
    "the same improbable answer": one_token_answers(-1.6094, 16, 0.02),
    "one-token answers after top-p 0.9": one_token_answers(0.0, 32, 0.05),
    "seven tokens": both(-1.0, 7, 0.9),
}


@SEEDS
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("build", LEGITIMATE.values(), ids=LEGITIMATE)
def test_equal_log_probs_are_legitimate_where_the_trainer_agrees(build, seed) -> None:
    call(*build(torch.Generator().manual_seed(seed)))


@SEEDS
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_healthy_log_probs_of_any_size_are_legitimate(seed, dtype) -> None:
    proximal, behavior = draw(seed, shortest=1)
    call(proximal, [x.to(dtype) for x in behavior])


@SEEDS
@pytest.mark.filterwarnings("error")
def test_a_small_top_p_makes_many_probable_tokens_certain(seed) -> None:
    # Behavior log-probs of what top-p 0.7 leaves: 0 where one token has more.
    proximal, behavior = draw(seed)
    call(proximal, [torch.where(x > math.log(0.7), 0.0, x) for x in behavior])


@SEEDS
@pytest.mark.filterwarnings("error")
def test_a_normalizer_in_bfloat16_may_leave_a_little_above_0(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, rest = 18.0 + torch.rand(300, generator=generator), torch.randn(300, generator=generator) + 10.0
    normalizer = torch.stack([logits, rest]).logsumexp(0)
    behavior = logits - normalizer.bfloat16().float()
    assert (behavior > 0.0).float().mean() > 0.01
    call([logits - normalizer], [behavior])


@SEEDS
@pytest.mark.filterwarnings("error")
def test_one_log_prob_above_0_is_no_pattern(seed) -> None:
    proximal, behavior = draw(seed)
    behavior[0][7] = 0.5
    call(proximal, behavior)


# --- armed until a check has seen enough


def masked_call(args: Any, columns: Columns, masks: list[torch.Tensor]) -> tuple:
    lengths = [mask.numel() for mask in masks]
    return mis_ext.compute_mis_weights_with_cp(
        args,
        pg_loss=torch.ones(sum(lengths)),
        train_log_probs=columns[0],
        rollout_log_probs=columns[1],
        loss_masks=masks,
        total_lengths=[length + 4 for length in lengths],
        response_lengths=lengths,
    )


def not_judged() -> dict[str, Callable[[Any], object]]:
    proximal, behavior = draw(3)
    few = [x[:7] for x in proximal[:1]], [x[:7] for x in behavior[:1]]
    nothing = [torch.empty(0)], [torch.empty(0)]
    return {
        "fully masked": lambda args: masked_call(args, (proximal, behavior), [torch.zeros(len(x)) for x in proximal]),
        "zero-length": lambda args: masked_call(args, nothing, [torch.empty(0)]),
        "no samples": lambda args: masked_call(args, ([], []), []),
        "few tokens": lambda args: call(*few, args=args),
    }


@pytest.mark.parametrize("first", not_judged().values(), ids=not_judged())
@pytest.mark.parametrize("mistake", ["degenerate", "shifted"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_micro_batch_that_cannot_be_judged_disarms_nothing(first, mistake, times) -> None:
    args = argparse.Namespace(use_tis=True)
    for _ in range(times):
        first(args)
    proximal, behavior = draw(4)
    spoilt = [torch.zeros_like(x) if mistake == "degenerate" else x.roll(1) for x in behavior]
    with pytest.raises(ValueError, match={"degenerate": "placeholders", "shifted": "shifted by one token"}[mistake]):
        call(proximal, spoilt, args=args)


@pytest.mark.parametrize("mistake", ["degenerate", "shifted"])
def test_tiny_micro_batches_add_up(mistake) -> None:
    args = argparse.Namespace(use_tis=True)
    proximal, behavior = draw(5, noise=0.0, shortest=200, longest=200)
    spoilt = behavior[0].roll(1) if mistake == "shifted" else torch.zeros_like(behavior[0])
    # Eight tokens below -1; and four pairs each, of which 64 are needed.
    last = {"degenerate": int((proximal[0] < -1.0).nonzero()[7]) // 5 * 5, "shifted": 75}[mistake]
    for start in range(0, last, 5):
        call([proximal[0][start : start + 5]], [spoilt[start : start + 5]], args=args)
    with pytest.raises(ValueError, match={"degenerate": "placeholders", "shifted": "shifted by one token"}[mistake]):
        call([proximal[0][last : last + 5]], [spoilt[last : last + 5]], args=args)


def test_a_few_zeros_that_are_a_doubt_disarm_nothing_before_enough_was_seen() -> None:
    args = argparse.Namespace(use_tis=True)
    proximal, behavior = draw(5, noise=0.0, shortest=200, longest=200)
    short = behavior[0][:50].clone()
    short[proximal[0][:50].topk(2, largest=False).indices] = 0.0
    call([proximal[0][:50]], [short], args=args)
    with pytest.raises(ValueError, match="placeholders"):
        call(proximal, [torch.zeros_like(each) for each in behavior], args=args)


def test_one_token_answers_arm_the_check_for_shifts_for_good() -> None:
    args = argparse.Namespace(use_tis=True)
    for _ in range(3):
        call([torch.tensor([-0.5 - i / 1000]) for i in range(40)], [torch.tensor([-0.5])] * 40, args=args)
    assert not session_for(args)._data.is_done


def test_neighbors_are_tokens_of_one_response_with_nothing_between_them() -> None:
    layout = mis_ext.PackedLayout.context_parallel([13, 9], total_lengths=[16, 12], cp_rank=0, cp_size=2)
    log_probs_T = torch.full((layout.num_local_tokens,), -1.0)
    streams = mis_ext.PackedStreams(log_probs_T, log_probs_T, torch.ones(layout.num_whole_tokens), layout)
    parts = [length for length in layout.pieces.lengths if length > 0]
    assert len(parts) == 4
    assert guards.data_sums(streams)[guards.PAIRS] == sum(parts) - len(parts)
