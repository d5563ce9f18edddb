# SPDX-License-Identifier: Apache-2.0
"""Samples that share a rollout, and so a denominator: ``mis_denominator: kept`` refuses them."""

import argparse

import pytest
import torch
from hook_batches import make_batch

from mis_ext import prepare_rollout

KEPT = {"use_tis": True, "mis_denominator": "kept", "rs_veto_upper_threshold": 50.0}


def shared_rollout() -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Four samples with 10, 30, 20 and 8 trainable tokens, the first two of one rollout."""
    batch = make_batch(4, 40, noise=0.0)
    for mask, count in zip(batch["loss_masks"], (10, 30, 20, 8), strict=True):
        mask[count:] = 0
    return batch, torch.tensor([10.0, 30.0, 20.0, 8.0]), torch.tensor([40.0, 40.0, 20.0, 8.0])


def test_shared_denominators_are_refused_where_kept_tokens_make_the_denominator() -> None:
    batch, own, shared = shared_rollout()
    for sums in (shared, [*shared]):
        with pytest.raises(ValueError, match="mis_denominator: kept"):
            prepare_rollout(argparse.Namespace(**KEPT), 0, batch | {"rollout_mask_sums": sums})
    for sums in ({}, {"rollout_mask_sums": own}, {"rollout_mask_sums": own.tolist()}):
        prepare_rollout(argparse.Namespace(**KEPT), 0, batch | sums)
    for more in ({"calculate_per_token_loss": True}, {"mis_denominator": "fixed"}):
        prepare_rollout(argparse.Namespace(**KEPT | more), 0, batch | {"rollout_mask_sums": shared})


def test_a_sample_without_trainable_tokens_shares_nothing() -> None:
    batch, _, _ = shared_rollout()
    batch["loss_masks"][1].zero_()
    prepare_rollout(argparse.Namespace(**KEPT), 0, batch | {"rollout_mask_sums": torch.tensor([10.0, 10.0, 20.0, 8.0])})


def test_denominators_for_other_samples_are_refused() -> None:
    batch, own, _ = shared_rollout()
    with pytest.raises(ValueError, match=r"rollout_mask_sums has shape \[3\]"):
        prepare_rollout(argparse.Namespace(**KEPT), 0, batch | {"rollout_mask_sums": own[:3]})
