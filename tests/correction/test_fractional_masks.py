# SPDX-License-Identifier: Apache-2.0
"""One rule for masks: not 0 is a response token, and what is kept comes back as it was given."""

from argparse import Namespace

import loss_cases
import pytest
import torch
from thread_ranks import Rank, run_ranks
from zigzag import take

import mis_ext

MASKS = [torch.tensor([0.25, 1.0, 0.0, 0.5, 2.0]), torch.tensor([0.0, 0.75, 1.0])]
LENGTHS = [5, 3]
TOTALS = [9, 7]
GATE = {"use_rs": True, "rs_level": "token", "rs_lower_bound": 0.5, "rs_upper_bound": 2.0}


def hook(*, masks=MASKS, far: int | None = None, rank: Rank | None = None, **keys) -> tuple:
    """The hook where both engines agree, but for one token of the first response."""
    behavior = [torch.full((length,), -1.0) for length in LENGTHS]
    proximal = [values.clone() for values in behavior]
    if far is not None:
        proximal[0][far] = -9.0
    if rank is not None:
        place = {"cp_rank": rank.cp_rank, "cp_size": 2, "total_lengths": TOTALS}
        proximal, behavior = take(proximal, **place), take(behavior, **place)
    return mis_ext.compute_mis_weights_with_cp(
        Namespace(**({"use_tis": True, "mis_guard": "warn", "mis_metrics": "all"} | keys)),
        pg_loss=torch.ones(sum(map(len, proximal))),
        train_log_probs=proximal,
        rollout_log_probs=behavior,
        loss_masks=masks,
        total_lengths=TOTALS,
        response_lengths=LENGTHS,
        parallel_state=None if rank is None else rank.parallel_state,
    )


def test_masks_come_back_as_given_whether_one_corrects_or_measures() -> None:
    for keys in ({}, GATE, {"use_tis": False, "get_mismatch_metrics": True}):
        _, masks, _ = hook(**keys)
        assert [mask.tolist() for mask in masks] == [mask.tolist() for mask in MASKS]


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_rejected_token_is_0_and_the_others_are_as_given(cp_size) -> None:
    found = [hook(far=3, **GATE)] if cp_size == 1 else run_ranks(lambda rank: hook(far=3, rank=rank, **GATE), cp_size=2)
    for _, masks, _ in found:
        assert [mask.tolist() for mask in masks] == [[0.25, 1.0, 0.0, 0.0, 2.0], [0.0, 0.75, 1.0]]
        assert {mask.dtype for mask in masks} == {torch.float32}


def test_statistics_and_metrics_count_such_a_token_once() -> None:
    ones = [(mask != 0).int() for mask in MASKS]
    keys = {"tis_level": "geometric", "tis_batch_normalize": True, "mis_denominator": "kept", **GATE}
    loss, masks, metrics = hook(far=3, **keys)
    wanted_loss, wanted_masks, wanted = hook(far=3, masks=ones, **keys)
    assert torch.equal(loss, wanted_loss)
    assert torch.equal(torch.cat(masks), torch.cat(wanted_masks) * torch.cat(MASKS))
    for name, values in metrics.items():
        assert torch.equal(values, wanted[name]), name


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.uint8, torch.bfloat16])
def test_a_mask_of_ones_of_any_dtype_comes_back_as_ones(dtype) -> None:
    masks = hook(masks=[(mask != 0).to(dtype) for mask in MASKS])[1]
    assert torch.cat(masks).tolist() == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0]


# --- the whole loss


def whole_loss(*factors: float, divisors: bool, **keys) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Loss, gradient and metrics with the masks of the samples times factors."""
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    batch["loss_masks"] = [mask * factor for mask, factor in zip(batch["loss_masks"], factors, strict=True)]
    if not divisors:
        del batch["rollout_mask_sums"]
    logits = batch.pop("logits").clone().requires_grad_()
    loss, metrics = mis_ext.policy_loss(loss_cases.host_args(**keys), batch, logits)
    loss.backward()
    return loss.detach(), logits.grad, metrics


ONES, HALVES = (1.0,) * 6, (0.5,) * 6
OPTIONS = {
    name: loss_cases.OPTIONS[name] for name in ("ppo", "gates, entropy, kl", "sequences, tokens", "metrics only")
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_whole_loss_weighs_a_token_with_its_mask_as_the_hosts_do(name) -> None:
    keys = OPTIONS[name]
    loss, gradient, metrics = whole_loss(*ONES, divisors=True, **keys)
    half, half_gradient, half_metrics = whole_loss(*HALVES, divisors=True, **keys)
    # The host's denominators do not change: a half of everything.
    torch.testing.assert_close(half, loss * 0.5)
    torch.testing.assert_close(half_gradient, gradient * 0.5)
    for metric in ("pg_loss", "ppo_kl", "pg_clipfrac"):
        torch.testing.assert_close(half_metrics[metric], metrics[metric] * 0.5)
    # Of one sample alone: it loses a half of its share.
    _, one_gradient, _ = whole_loss(0.5, *ONES[1:], divisors=True, **keys)
    begin, end = 0, loss_cases.TOTALS[0]
    torch.testing.assert_close(one_gradient[:, begin:end], gradient[:, begin:end] * 0.5)
    assert torch.equal(one_gradient[:, end:], gradient[:, end:])
    assert gradient.any()


def test_without_divisors_of_the_host_a_sample_is_a_weighted_mean() -> None:
    keys = loss_cases.OPTIONS["gates, entropy, kl"]
    loss, gradient, _ = whole_loss(*ONES, divisors=False, **keys)
    # Masks twice as large are the same weights; their sums are at least 1, below which the hosts do not divide.
    twice, twice_gradient, _ = whole_loss(*(2.0,) * 6, divisors=False, **keys)
    torch.testing.assert_close(twice, loss)
    torch.testing.assert_close(twice_gradient, gradient)


@pytest.mark.parametrize("keys", [{"advantage_estimator": "gspo"}, {"use_opsm": True, "opsm_delta": -0.18}])
def test_a_ratio_of_a_sequence_counts_a_token_once_where_slime_weighs_it_as_the_page_says(keys) -> None:
    log_ratio, mask, sign = torch.tensor([0.1, 0.3]), torch.tensor([1.0, 0.5]), -1.0 if "use_opsm" in keys else 1.0
    current = (torch.full((2,), -2.0) + log_ratio).requires_grad_()
    found = mis_ext.policy_loss_from_log_probs(
        keys | {"eps_clip": 0.9},
        current_logprobs=current[None],
        proximal_logprobs=torch.full((1, 2), -2.0),
        advantages=torch.tensor([sign]),
        response_mask=mask[None],
    )
    (gradient,) = torch.autograd.grad(found.total, current)
    mean, weighed = log_ratio.mean(), (log_ratio * mask).sum() / mask.sum()
    if "use_opsm" in keys:
        # The mean of old / current is -0.2, and the sequence stays; weighed by the mask it is -0.167, above the limit.
        assert -mean < keys["opsm_delta"] < -weighed
        assert gradient.all()
        assert found.metrics["opsm_clipfrac"].value() == 0.0
    else:
        torch.testing.assert_close(found.total, -mean.exp())
        torch.testing.assert_close(gradient, -mean.exp() * torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_rejected_token_counts_0_whatever_its_mask_holds(value: float) -> None:
    """The guards refuse such a mask in the first calls; without them 0 times NaN would leave the gate's decision."""
    found = mis_ext.compute_correction(
        proximal_logprobs_T=torch.tensor([-1.0, -1.0, -1.0]),
        behavior_logprobs_T=torch.tensor([-1.0, -9.0, -1.0]),
        response_mask_R=torch.tensor([1.0, value, 1.0]),
        layout=mis_ext.PackedLayout.whole([3]),
        config=mis_ext.CorrectionConfig(gates=(mis_ext.Gate(reduce="token", low=0.5, high=2.0),)),
    )
    assert found.loss_mask_R.tolist() == [1.0, 0.0, 1.0]
