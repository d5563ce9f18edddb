# SPDX-License-Identifier: Apache-2.0
"""A metric is one number per sequence, so that no split into micro-batches and no token without a ratio changes it.

Group metrics (``over`` G) are left out where batches are split: they belong to the call.
"""

import itertools
import math
from collections.abc import Iterator
from functools import partial

import hypothesis.strategies as st
import pytest
import torch
from cases import (
    ATOL,
    GATES,
    RTOL,
    VETOES,
    WEIGHTS,
    assert_close,
    call_hook,
    correction_keys,
    drawn_samples,
    flat,
    random_samples,
    sprinkle,
    tolerance,
)
from host_loop import sum_of_sample_mean, sum_of_token
from hypothesis import assume, given
from reference import Samples, correct
from searching import searching
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mis_ext
from mis_ext.correction.layout import PackedStreams

FUZZ = searching(15)
# Weights are applied as they are: a normalizer belongs to the batch.
KEYS = st.builds(
    correction_keys, st.sampled_from(WEIGHTS), gate=st.sampled_from(GATES), veto=st.sampled_from(list(VETOES))
)
reducers = pytest.mark.parametrize("per_token", [False, True], ids=["sample means", "token sums"])


def of_samples(keys: dict) -> list[str]:
    """Metrics that are means over samples or tokens."""
    return [f"mis_{row.name}" for row in mis_ext.config_from_mapping(keys).rows.values() if row.over != "group"]


def cut(samples: Samples, cuts: list[int]) -> Iterator[Samples]:
    """Micro-batches; some may be empty."""
    edges = [0, *sorted(cuts), len(samples.masks)]
    for begin, end in itertools.pairwise(edges):
        yield Samples(*(column[begin:end] for column in (samples.train, samples.rollout, samples.masks)))


def plotted(metric_T: torch.Tensor, samples: Samples, *, per_token: bool) -> torch.Tensor:
    """What one call adds to a host's curve, before it divides by the number of samples or tokens of the step."""
    values = metric_T.split([mask.numel() for mask in samples.masks]) if samples.masks else []
    return sum_of_token(values, samples.masks) if per_token else sum_of_sample_mean(values, samples.masks)


def shown(tokens: dict[str, list], name: str, samples: Samples) -> torch.Tensor:
    """What the judge says of each token, 0 outside the response."""
    return flat(tokens[name]).where(flat(samples.masks) != 0, 0.0)


def all_are_measured(samples: Samples) -> bool:
    """Whether every response has a token with a finite ratio."""
    columns = zip(samples.train, samples.rollout, samples.masks, strict=True)
    return all(not mask.any() or bool(((t - r).isfinite() & mask.bool()).any()) for t, r, mask in columns)


def correction_of(keys: dict, samples: Samples) -> mis_ext.Correction:
    return mis_ext.compute_correction(
        proximal_logprobs_T=torch.cat([torch.zeros(0), *samples.train]),
        behavior_logprobs_T=torch.cat([torch.zeros(0), *samples.rollout]),
        response_mask_R=torch.cat([torch.zeros(0), *samples.masks]),
        layout=mis_ext.PackedLayout.whole([mask.numel() for mask in samples.masks]),
        config=mis_ext.config_from_mapping(keys),
    )


@reducers
@FUZZ
@given(keys=KEYS, samples=drawn_samples(), data=st.data())
def test_a_curve_is_that_of_any_split_into_micro_batches_and_of_the_judge(per_token, keys, samples, data):
    (expected,) = correct([samples], keys, per_token_loss=per_token)
    assume(expected.margin > 1e-5)
    cuts = data.draw(st.lists(st.integers(0, len(samples.masks)), max_size=3))
    whole = call_hook(keys, samples, per_token_loss=per_token)[2]
    parts = [(part, call_hook(keys, part, per_token_loss=per_token)[2]) for part in cut(samples, cuts)]
    response = flat(samples.masks) != 0
    of_cuts = [(part, correct([part], keys, per_token_loss=per_token)[0].tokens) for part, _ in parts]
    size = response.sum() if per_token else torch.tensor([bool(mask.any()) for mask in samples.masks]).sum()
    scale = size.clamp(min=1)
    for name in of_samples(keys):
        close = partial(torch.testing.assert_close, rtol=RTOL, atol=tolerance(name, samples), equal_nan=True, msg=name)
        judged = plotted(shown(expected.tokens, name, samples), samples, per_token=per_token)
        of_whole = plotted(whole[name], samples, per_token=per_token)
        of_parts = sum(plotted(metrics[name], part, per_token=per_token) for part, metrics in parts)
        close(of_whole / scale, judged / scale)
        # A response of which nothing is known counts as the mean of its own micro-batch.
        by_parts = sum(plotted(shown(tokens, name, part), part, per_token=per_token) for part, tokens in of_cuts)
        close(of_parts / scale, by_parts / scale)
        if all_are_measured(samples):
            close(of_parts / scale, judged / scale)
        if "fraction" in name and not of_parts.isnan():
            assert -1e-6 <= float(of_parts / scale) <= 1 + 1e-6, name


def test_a_response_with_one_valid_token_of_many_counts_once_however_it_is_batched():
    # One of eight has a ratio, of 3: all that can be known of the response is that its tokens have ratio 3.
    broken = torch.full((8,), math.nan)
    broken[5] = -1.0
    samples = Samples(
        [broken, torch.full((4,), -1.0)],
        [torch.full((8,), -1.0 - math.log(3.0)), torch.full((4,), -1.0)],
        [torch.ones(8), torch.ones(4)],
    )
    keys = correction_keys(("token", "truncate"), tis_upper_bound=2.0)
    hand = {
        "mis_phantom_clip_fraction": (1.0, 0.0),
        "mis_tis_truncate_fraction": (1.0, 0.0),
        "mis_tis_weight_before_bound": (3.0, 1.0),
        "mis_tis_weight_after_bound": (2.0, 1.0),
        "mis_is_ratio_mean_after_tis_rs": (2.0, 1.0),
        "mis_is_ratio_mean_final": (2.0, 1.0),
        "mis_is_ratio_min_final": (2.0, 1.0),
        "mis_is_ratio_max_final": (2.0, 1.0),
        "mis_nonfinite_token_fraction": (7 / 8, 0.0),
        "mis_kept_token_fraction": (1 / 8, 1.0),
        "mis_kept_seq_fraction": (1.0, 1.0),
    }
    for cuts in ([], [1]):
        parts = [(part, call_hook(keys, part)[2]) for part in cut(samples, cuts)]
        for name, (first, second) in hand.items():
            metric_T = torch.cat([metrics[name] for _, metrics in parts])
            wanted = torch.tensor([first] * 8 + [second] * 4, dtype=torch.float64)
            assert_close(metric_T, wanted, what=name)


@pytest.mark.parametrize("weight", WEIGHTS, ids=" ".join)
def test_a_response_without_a_valid_token_reads_the_mean_of_the_others_and_spoils_none(weight):
    samples = random_samples([4, 3, 5], seed=91, mask=1.0)
    without = Samples(samples.train[::2], samples.rollout[::2], samples.masks[::2])
    samples.train[1].fill_(math.nan)
    keys = correction_keys(weight, gate="token gate", veto="all vetoes")
    metrics, expected = call_hook(keys, samples)[2], call_hook(keys, without)[2]
    of_response = {"mis_nonfinite_token_fraction", "mis_kept_token_fraction", "mis_kept_seq_fraction"}
    vetoes = ("rs_catastrophic", "rs_veto_upper", "rs_veto_probability")
    of_response |= {f"mis_{veto}_{what}_fraction" for veto in vetoes for what in ("token", "seq")}
    of_response |= {"mis_unmeasured_seq_fraction"}
    for name in of_samples(keys):
        first, broken, last = metrics[name].split([4, 3, 5])
        if name not in of_response:
            wanted = ((first[0] + last[0]) / 2).expand(3)
            torch.testing.assert_close(broken, wanted, rtol=RTOL, atol=ATOL, msg=name)
        # No number of a response is made of another's.
        assert torch.equal(torch.cat([first, last]), expected[name]), name


@FUZZ
@given(keys=KEYS, samples=drawn_samples(), data=st.data())
def test_totals_and_counts_of_calls_add_up_to_the_mean_of_the_judge(keys, samples, data):
    (expected,) = correct([samples], keys)
    assume(expected.margin > 1e-5)
    cuts = data.draw(st.lists(st.integers(0, len(samples.masks)), max_size=3))
    calls = [correction_of(keys, part).metrics for part in cut(samples, cuts)]
    for name in of_samples(keys):
        means = [metrics[name] for metrics in calls]
        assert all(isinstance(mean, mis_ext.Mean) for mean in means)
        total, count = sum(mean.total for mean in means), sum(mean.count for mean in means)
        wanted = torch.tensor(expected.values[name], dtype=torch.float64)
        assert_close(mis_ext.Mean(total, count).value(), wanted, what=name, atol=tolerance(name, samples))


class NoPassOverTokens(TorchDispatchMode):
    """Refuses operations on as many numbers as there are tokens."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.num_tokens, self.num_operations = num_tokens, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        assert all(tensor.numel() < self.num_tokens for tensor in tensors), f"{func} reads tokens"
        self.num_operations += 1
        return out


def test_metrics_as_numbers_need_no_second_pass_over_tokens(monkeypatch):
    samples = sprinkle(random_samples([700, 3, 900], seed=92), seed=92, share=0.01)
    for weight in [("token", "clip"), ("sequence", "truncate")]:
        keys = correction_keys(weight, gate="geometric gate", veto="all vetoes", normalizer="kept")
        correction = correction_of(keys, samples)
        with monkeypatch.context() as patch, NoPassOverTokens(1603) as recorder:
            patch.setattr(PackedStreams, "tokens", None)
            metrics = {name: metric.value() for name, metric in correction.metrics.items()}
        assert recorder.num_operations > len(metrics) > 40
        (expected,) = correct([samples], keys)
        for name, value in metrics.items():
            assert_close(value, torch.tensor(expected.values[name], dtype=torch.float64), what=name)


NAMES = ["spike_over_5", "over", "a_over_valid", "sum_x_over_kept", "_over_", "class"]


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_gate_may_have_any_word_in_it(name) -> None:
    samples = random_samples([5, 9, 3], seed=3)
    lists = {"train_log_probs": samples.train, "rollout_log_probs": samples.rollout, "loss_masks": samples.masks}

    def metrics(first: str) -> dict[str, torch.Tensor]:
        gates = mis_ext.Gate(high=1.25, name=first), mis_ext.Gate(reduce="max", high=3.0, name=f"{first}_too")
        after = mis_ext.Gate(statistic="k3", reduce="mean", high=0.5, name=f"{first}_after")
        config = mis_ext.CorrectionConfig(gates=(*gates, after), metrics="all")
        return mis_ext.compute_mis_weights(config, **lists)[2]

    plain, named = metrics("plain"), metrics(name)
    assert [key.replace("plain", name) for key in plain] == [*named]
    torch.testing.assert_close([*named.values()], [*plain.values()], rtol=0.0, atol=0.0, equal_nan=True)


def test_of_lags_that_are_all_unknown_none_is_the_largest() -> None:
    found = mis_ext.compute_correction(
        proximal_logprobs_T=torch.zeros(2),
        behavior_logprobs_T=torch.zeros(2),
        response_mask_R=torch.ones(2),
        layout=mis_ext.PackedLayout.whole([2]),
        config=mis_ext.CorrectionConfig(staleness=True),
        lag_T=torch.full((2,), torch.nan),
    )
    assert found.metrics["mis_lag_max"].value().isnan()
