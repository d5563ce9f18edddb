# SPDX-License-Identifier: Apache-2.0
"""The scale of a whole rollout: who sets it, whom it is for, and what samples that share a rollout do to it."""

import argparse
from types import SimpleNamespace

import pytest
import torch
from hook_batches import call, make_batch

import mis_ext
from mis_ext import prepare_rollout
from mis_ext.hosts.runs import session_for
from mis_ext.hosts.slime_miles import rollout

SCOPE = {"use_tis": True, "tis_batch_normalize": True, "tis_normalize_scope": "rollout"}
KEPT = {"use_tis": True, "mis_denominator": "kept", "tis_normalize_scope": "rollout", "rs_veto_upper_threshold": 50.0}


def rollout_of(batch: dict) -> dict:
    return {"log_probs": batch["train_log_probs"], **batch}


def test_rollout_scope_without_its_hook_names_the_flag() -> None:
    with pytest.raises(ValueError, match=r"--rollout-data-postprocess-path mis_ext\.prepare_rollout"):
        call(make_batch(), **SCOPE, tis_upper_bound=2.5)


def test_miles_gives_no_rollout_data() -> None:
    with pytest.raises(ValueError, match="passes no rollout data; use data_parallel"):
        prepare_rollout(argparse.Namespace(**SCOPE))


@pytest.mark.parametrize("missing", ["log_probs", "rollout_log_probs"])
def test_a_rollout_without_log_probs_is_refused(missing) -> None:
    batch = make_batch()
    data = {"log_probs": batch["train_log_probs"], **batch}
    del data[missing]
    with pytest.raises(ValueError, match=f"rollout 7 has no {missing}"):
        prepare_rollout(argparse.Namespace(**SCOPE), 7, data)


def test_other_scopes_need_nothing_from_the_rollout() -> None:
    prepare_rollout(argparse.Namespace(use_tis=True, tis_batch_normalize=True), 0, {})
    prepare_rollout(argparse.Namespace(use_tis=False, get_mismatch_metrics=True))


def test_every_micro_batch_of_a_rollout_is_scaled_alike_until_the_next_rollout() -> None:
    args = argparse.Namespace(**SCOPE, mis_metrics="all")
    batches = [make_batch(seed=seed, noise=0.2) for seed in (1, 2)]
    for batch in batches:
        prepare_rollout(args, 0, {"log_probs": batch["train_log_probs"], **batch})
        log_ratio = torch.cat(batch["train_log_probs"]) - torch.cat(batch["rollout_log_probs"])
        mean = log_ratio.exp().clamp_max(2.0).mean()
        for other in batches:
            _, _, metrics = mis_ext.compute_mis_weights_with_cp(args, **other)
            torch.testing.assert_close(metrics["mis_batch_norm_factor"], mean.expand(160), rtol=1e-6, atol=0.0)


# --- whose scale it is


def test_args_with_equal_keys_have_scales_of_their_own() -> None:
    actor, other = argparse.Namespace(**SCOPE, mis_metrics="all"), argparse.Namespace(**SCOPE, mis_metrics="all")
    for args, noise in ((actor, 0.2), (other, 0.6)):
        prepare_rollout(args, 0, rollout_of(make_batch(noise=noise)))
    batch = make_batch(noise=0.2)
    found = [
        mis_ext.compute_mis_weights_with_cp(args, **batch)[2]["mis_batch_norm_factor"][0] for args in (actor, other)
    ]
    assert abs(found[0] - 1.0) < 0.05
    assert abs(found[0] - found[1]) > 0.01


def test_after_a_failed_rollout_the_scale_of_the_last_one_is_not_used() -> None:
    args, batch = argparse.Namespace(**SCOPE), make_batch()
    prepare_rollout(args, 0, rollout_of(batch))
    mis_ext.compute_mis_weights_with_cp(args, **batch)
    with pytest.raises(ValueError, match="rollout 1 has no rollout_log_probs"):
        prepare_rollout(args, 1, rollout_of(batch) | {"rollout_log_probs": None})
    with pytest.raises(ValueError, match="scope: rollout needs the scale of the rollout"):
        mis_ext.compute_mis_weights_with_cp(args, **batch)
    prepare_rollout(args, 2, rollout_of(batch))
    mis_ext.compute_mis_weights_with_cp(args, **batch)


# --- samples that share a rollout


def shared_rollout() -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Four samples with 10, 30, 20 and 8 trainable tokens, the first two of one rollout; the first has an outlier."""
    batch = make_batch(4, 40, noise=0.0)
    for mask, count in zip(batch["loss_masks"], (10, 30, 20, 8), strict=True):
        mask[count:] = 0
    batch["rollout_log_probs"][0][3] -= 5.0
    return batch, torch.tensor([10.0, 30.0, 20.0, 8.0]), torch.tensor([40.0, 40.0, 20.0, 8.0])


def total_of(args: argparse.Namespace, batch: dict, parts: list[slice], denominators: torch.Tensor) -> float:
    """What the host's reducer makes of a loss of 1 per token, over micro-batches."""
    total = 0.0
    for part in parts:
        samples = {name: value[part] for name, value in batch.items() if name != "pg_loss"}
        ones = torch.ones(sum(samples["response_lengths"]))
        loss, masks, _ = mis_ext.compute_mis_weights_with_cp(args, **samples, pg_loss=ones)
        sums = [(x * m).sum() for x, m in zip(loss.split(samples["response_lengths"]), masks, strict=True)]
        total += float((torch.stack(sums) / denominators[part]).sum())
    return total


@pytest.mark.parametrize("parts", [[slice(0, 4)], [slice(0, 1), slice(1, 3), slice(3, 4)]], ids=["one", "three"])
@pytest.mark.parametrize("as_list", [True, False])
def test_samples_that_share_a_rollout_share_its_denominator(parts, as_list) -> None:
    batch, _, shared = shared_rollout()
    args = argparse.Namespace(**KEPT)
    sums = [*shared] if as_list else shared
    prepare_rollout(args, 0, rollout_of(batch) | {"rollout_mask_sums": sums})
    # 3 rollouts over 30/40 + 1 + 1 that are left; with denominators of their own it would be 4 over 3.
    assert session_for(args).rollout_scale.denominator_factor == pytest.approx(3.0 / 2.75)
    assert total_of(args, batch, parts, shared) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize(
    ("action", "per_token", "per_sample"), [("reject", 68.0 / 58.0, 3.0 / 2.75), ("zero", 1.0, 1.0)]
)
@pytest.mark.parametrize("per_token_loss", [False, True])
def test_what_is_rejected_is_made_up_for_and_what_stays_in_the_mask_is_not(
    per_token_loss, action, per_token, per_sample
) -> None:
    batch, _, shared = shared_rollout()
    gate = {"reduce": "max", "high": 50.0, "action": action}
    mis = {"weight": {}, "gates": [gate], "denominator": "kept", "scope": "rollout"}
    args = argparse.Namespace(mis=mis, calculate_per_token_loss=per_token_loss)
    prepare_rollout(args, 0, rollout_of(batch) | {"rollout_mask_sums": shared})
    expected = per_token if per_token_loss else per_sample
    assert session_for(args).rollout_scale.denominator_factor == pytest.approx(expected)


def test_samples_of_their_own_keep_their_denominators() -> None:
    batch, own, _ = shared_rollout()
    for sums in ({}, {"rollout_mask_sums": own}):
        args = argparse.Namespace(**KEPT)
        prepare_rollout(args, 0, rollout_of(batch) | sums)
        assert session_for(args).rollout_scale.denominator_factor == pytest.approx(4.0 / 3.0)
        assert total_of(args, batch, [slice(0, 4)], own) == pytest.approx(4.0, rel=1e-6)


def test_a_loss_per_token_knows_no_shared_denominators() -> None:
    batch, own, shared = shared_rollout()
    for sums in ({}, {"rollout_mask_sums": own}, {"rollout_mask_sums": shared}):
        args = argparse.Namespace(**KEPT, calculate_per_token_loss=True)
        prepare_rollout(args, 0, rollout_of(batch) | sums)
        assert session_for(args).rollout_scale.denominator_factor == pytest.approx(68.0 / 58.0)


def test_the_mean_weight_knows_no_denominators() -> None:
    batch, _, shared = shared_rollout()
    factors = []
    for sums in ({}, {"rollout_mask_sums": shared}):
        args = argparse.Namespace(**SCOPE, mis_denominator="kept", tis_normalize_over="valid")
        prepare_rollout(args, 0, rollout_of(batch) | sums)
        factors.append(session_for(args).rollout_scale.mean_weight)
    # One of 68 weights is 2, the others are 1.
    assert factors == [pytest.approx(69.0 / 68.0)] * 2


@pytest.mark.parametrize("scope", ["data_parallel", "micro_batch"])
def test_shared_denominators_are_refused_where_nobody_knows_them(scope) -> None:
    batch, own, shared = shared_rollout()
    keys = KEPT | {"tis_normalize_scope": scope}
    with pytest.raises(
        ValueError, match=r"several samples of this rollout share a denominator.*tis_normalize_scope: rollout"
    ):
        prepare_rollout(argparse.Namespace(**keys), 0, batch | {"rollout_mask_sums": shared})
    for sums in ({}, {"rollout_mask_sums": own}, {"rollout_mask_sums": own.tolist()}):
        prepare_rollout(argparse.Namespace(**keys), 0, batch | sums)
    prepare_rollout(argparse.Namespace(**keys, calculate_per_token_loss=True), 0, batch | {"rollout_mask_sums": shared})
    fixed = {name: value for name, value in keys.items() if name not in ("mis_denominator", "tis_normalize_scope")}
    prepare_rollout(argparse.Namespace(**fixed), 0, batch | {"rollout_mask_sums": shared})


def test_a_sample_without_trainable_tokens_shares_nothing() -> None:
    batch, _, _ = shared_rollout()
    batch["loss_masks"][1].zero_()
    args = argparse.Namespace(**KEPT | {"tis_normalize_scope": "micro_batch"})
    prepare_rollout(args, 0, batch | {"rollout_mask_sums": torch.tensor([10.0, 10.0, 20.0, 8.0])})


def test_a_rollout_without_trainable_tokens_has_no_denominator() -> None:
    batch, _, _ = shared_rollout()
    batch["loss_masks"][3].zero_()
    args = argparse.Namespace(**KEPT)
    prepare_rollout(args, 0, rollout_of(batch) | {"rollout_mask_sums": torch.tensor([40.0, 40.0, 20.0, 0.0])})
    assert session_for(args).rollout_scale.denominator_factor == pytest.approx(2.0 / 1.75)


def test_a_rank_of_an_earlier_pipeline_stage_has_no_log_probs_and_needs_no_scale(monkeypatch) -> None:
    for is_last in (True, False):
        stage = SimpleNamespace(is_pipeline_last_stage=lambda is_last=is_last: is_last)
        monkeypatch.setattr(rollout, "initialized_megatron", lambda stage=stage: stage)
        args, batch = argparse.Namespace(**SCOPE), make_batch()
        prepare_rollout(args, 0, rollout_of(batch) if is_last else batch)
        assert (session_for(args).rollout_scale is not None) == is_last


def test_denominators_for_other_samples_are_refused() -> None:
    batch, own, _ = shared_rollout()
    with pytest.raises(ValueError, match=r"rollout_mask_sums has shape \[3\], there are 4 loss_masks"):
        prepare_rollout(argparse.Namespace(**KEPT), 0, rollout_of(batch) | {"rollout_mask_sums": own[:3]})
