# SPDX-License-Identifier: Apache-2.0
"""The hook is called with exactly the keywords of each host, and answers in the form each host relies on."""

import math

import pytest
import torch
from cases import (
    ATOL,
    GATES,
    RTOL,
    WEIGHTS,
    args_of,
    assert_hook_output,
    correction_keys,
    flat,
    random_samples,
    sprinkle,
)
from host_loop import sum_of_sample_mean
from reference import Samples, correct

import mis_ext

LENGTHS = [5, 1, 9, 3, 12, 1, 2]
PROMPTS = [4, 7, 1, 3, 2, 5, 6]
METRICS_ONLY = {"use_tis": False, "get_mismatch_metrics": True, "mis_guard": "warn", "mis_metrics": "all"}


class Axis:
    """One axis of Miles' parallel state, on a single rank."""

    rank = 0
    size = 1
    group = None


class SingleRank:
    """Miles' parallel state of a run without parallelism."""

    cp = intra_dp = effective_dp = intra_dp_cp = dp = tp = Axis()


def slime_keywords(samples: Samples) -> dict:
    return {
        "train_log_probs": samples.train,
        "rollout_log_probs": samples.rollout,
        "loss_masks": samples.masks,
        "total_lengths": [p + m.numel() for p, m in zip(PROMPTS, samples.masks, strict=False)],
        "response_lengths": [m.numel() for m in samples.masks],
    }


def miles_keywords(samples: Samples, *, qkv_format: str) -> dict:
    keywords = slime_keywords(samples)
    padded = None if qkv_format == "thd" else [64] * len(samples.masks)
    return keywords | {"parallel_state": SingleRank(), "max_seq_lens": padded}


def keywords_of(host: str, samples: Samples) -> tuple[dict, str]:
    if host == "slime":
        return slime_keywords(samples), "thd"
    qkv_format = host.split()[1]
    return miles_keywords(samples, qkv_format=qkv_format), qkv_format


def gate_in_turn(turn: int) -> str:
    """Each weight has one gate, and modes have other gates at other levels: all pairs are asked of the judge."""
    return GATES[(turn + turn // len(GATES)) % len(GATES)]


hosts = pytest.mark.parametrize("host", ["slime", "miles thd", "miles bshd"])


@hosts
def test_each_host_gets_the_same_correct_answer(host):
    samples = random_samples(LENGTHS, seed=61)
    keywords, qkv_format = keywords_of(host, samples)
    pg_loss = torch.linspace(-1, 2, sum(LENGTHS))
    for turn, weight in enumerate(WEIGHTS):
        keys = correction_keys(weight, gate=gate_in_turn(turn), veto="low veto")
        args = args_of(keys, qkv_format=qkv_format)
        output = mis_ext.compute_mis_weights_with_cp(args=args, pg_loss=pg_loss, **keywords)
        assert_hook_output(output, correct([samples], keys)[0], samples, pg_loss=pg_loss)


@pytest.mark.parametrize("missing", [None, []], ids=["None", "empty list"])
@pytest.mark.parametrize("which", ["train_log_probs", "rollout_log_probs", "both"])
@hosts
def test_missing_log_probs_are_an_error_with_a_correction_and_nan_without(host, which, missing):
    samples = random_samples(LENGTHS, seed=64, mask=0.6)
    keywords, qkv_format = keywords_of(host, samples)
    names = ["train_log_probs", "rollout_log_probs"] if which == "both" else [which]
    broken = keywords | dict.fromkeys(names, missing)
    pg_loss = torch.ones(sum(LENGTHS))
    args = args_of({"use_tis": True}, qkv_format=qkv_format)
    with pytest.raises(ValueError, match="log"):
        mis_ext.compute_mis_weights_with_cp(args=args, pg_loss=pg_loss, **broken)

    args, pg_loss = args_of(METRICS_ONLY, qkv_format=qkv_format), pg_loss.requires_grad_()
    loss, masks, usual = mis_ext.compute_mis_weights_with_cp(args=args, pg_loss=pg_loss, **keywords)
    assert loss is pg_loss
    assert masks is samples.masks
    assert not any(values.requires_grad for values in usual.values())
    loss, masks, metrics = mis_ext.compute_mis_weights_with_cp(args=args, pg_loss=pg_loss, **broken)
    response = flat(samples.masks) != 0
    assert loss is pg_loss
    assert masks is samples.masks
    assert list(metrics) == list(usual)
    for name, value in metrics.items():
        assert value.shape == pg_loss.shape
        assert value[response].isnan().all(), name
        assert not value[~response].any(), name


@pytest.mark.parametrize("turn", range(len(WEIGHTS)), ids=[" ".join(weight) for weight in WEIGHTS])
def test_metric_names_and_their_order_depend_on_the_settings_alone(turn):
    masked = random_samples(LENGTHS, seed=67)
    for mask in masked.masks:
        mask.zero_()
    one = Samples([torch.tensor([-0.5])], [torch.tensor([-0.25])], [torch.ones(1)])
    broken = Samples([torch.tensor([math.nan] * 2)], [torch.tensor([-0.25] * 2)], [torch.ones(2)])
    batches = [
        random_samples(LENGTHS, seed=68),
        masked,
        one,
        broken,
        sprinkle(random_samples([2, 30], seed=69), seed=3),
    ]
    settings = {"gate": gate_in_turn(turn), "veto": ("no veto", "all vetoes")[turn // 2 % 2]}
    keys = correction_keys(WEIGHTS[turn], **settings, normalizer="kept", mis_denominator="kept")
    names = []
    for samples in batches:
        pg_loss = torch.ones(sum(m.numel() for m in samples.masks))
        args = args_of(keys)
        _, _, metrics = mis_ext.compute_mis_weights_with_cp(args=args, pg_loss=pg_loss, **slime_keywords(samples))
        names.append(list(metrics))
        response = flat(samples.masks) != 0
        assert all(value[~response].isfinite().all() for value in metrics.values())
    assert all(other == names[0] for other in names)
    assert all(name.startswith("mis_") for name in names[0])
    assert len(set(names[0])) == len(names[0])


def test_metric_values_of_the_host_reducer_are_the_metrics_of_the_samples():
    samples = random_samples(LENGTHS, seed=71)
    keys = correction_keys(("sequence", "truncate"))
    pg_loss = torch.ones(sum(LENGTHS))
    _, _, metrics = mis_ext.compute_mis_weights_with_cp(args=args_of(keys), pg_loss=pg_loss, **slime_keywords(samples))
    differences = [
        (t - r).double()[m != 0] for t, r, m in zip(samples.train, samples.rollout, samples.masks, strict=True)
    ]
    hand = {
        "mis_kl": sum(-d.mean() for d in differences),
        "mis_logprob_abs_diff": sum(d.abs().mean() for d in differences),
        "mis_log_ppl_abs_diff": sum(d.mean().abs() for d in differences),
        "mis_tis_weight_before_bound": sum(d.sum().clamp(-20, 20).exp() for d in differences),
        "mis_ratio_max": len(LENGTHS) * torch.cat(differences).max().exp(),
        "mis_kept_seq_fraction": torch.tensor(float(len(LENGTHS)), dtype=torch.float64),
    }
    for name, wanted in hand.items():
        actual = sum_of_sample_mean(metrics[name].split(LENGTHS), samples.masks)
        torch.testing.assert_close(actual, wanted, rtol=RTOL, atol=ATOL * len(LENGTHS))


def test_samples_without_a_token_and_fully_masked_batches_pass_through():
    empty = torch.zeros(0)
    token = torch.tensor([-1.0])
    samples = Samples([empty, token, empty], [empty, token, empty], [empty.int(), torch.zeros(1).int(), empty.int()])
    for weight in WEIGHTS:
        keys = correction_keys(weight, gate="token gate", veto="all vetoes", normalizer="kept", mis_denominator="kept")
        loss, masks, metrics = mis_ext.compute_mis_weights_with_cp(
            args=args_of(keys), pg_loss=torch.ones(1), **slime_keywords(samples)
        )
        assert torch.equal(loss, torch.zeros(1))
        assert [m.tolist() for m in masks] == [[], [0.0], []]
        assert all(value.isfinite().all() for value in metrics.values())
