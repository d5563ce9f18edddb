"""Inputs that do not fit: errors that name what is wrong. And the whole-rollout hook where the host cannot feed it."""

import argparse

import pytest
import torch
from test_guards import call, make_batch

import mis_ext
from mis_ext.collectives import gather_rows, merge_bits
from mis_ext.hosts.slime import prepare_rollout

SCOPE = {"use_tis": True, "tis_batch_normalize": True, "tis_normalize_scope": "rollout"}


@pytest.mark.parametrize("name", ["train_log_probs", "rollout_log_probs", "loss_masks"])
def test_samples_of_another_length_are_refused_even_if_the_total_fits(name) -> None:
    batch = make_batch(2, 10)
    batch[name] = [torch.cat(batch[name])[:9], torch.cat(batch[name])[9:]]
    with pytest.raises(ValueError, match=rf"{name} has samples of \[9, 11\] tokens on this rank.*\[10, 10\]"):
        call(batch)


def test_a_missing_sample_is_refused() -> None:
    batch = make_batch(3, 10)
    batch["rollout_log_probs"].pop()
    with pytest.raises(ValueError, match=r"rollout_log_probs has samples of \[10, 10\]"):
        call(batch)


def test_a_loss_of_another_length_is_refused() -> None:
    batch = make_batch(2, 10)
    batch["pg_loss"] = batch["pg_loss"][:-1]
    with pytest.raises(ValueError, match=r"pg_loss has 19 tokens on context-parallel rank 0 of 1, the lengths say 20"):
        call(batch)


def test_the_pipeline_checks_lengths_too() -> None:
    with pytest.raises(ValueError, match=r"behavior_logprobs_T has 3 tokens, the layout says 4"):
        mis_ext.compute_correction(
            proximal_logprobs_T=torch.zeros(4),
            behavior_logprobs_T=torch.zeros(3),
            response_mask_R=torch.ones(4),
            layout=mis_ext.PackedLayout.whole([3, 1]),
            config=mis_ext.CorrectionConfig(),
        )


def test_context_parallelism_needs_a_prompt_token() -> None:
    with pytest.raises(ValueError, match="needs a prompt token before every response"):
        mis_ext.PackedLayout.context_parallel([4, 4], total_lengths=[6, 4], cp_rank=0, cp_size=2)


def test_an_empty_micro_batch_comes_back_empty() -> None:
    empty = {"train_log_probs": [torch.empty(0)], "rollout_log_probs": [torch.empty(0)], "loss_masks": [torch.empty(0)]}
    batch = {"pg_loss": torch.empty(0), **empty, "total_lengths": [3], "response_lengths": [0]}
    loss, masks, metrics = call(batch, tis_batch_normalize=True)
    assert loss.numel() == 0
    assert [mask.numel() for mask in masks] == [0]
    assert all(values.numel() == 0 for values in metrics.values())


def test_rollout_scope_without_its_hook_names_the_flag() -> None:
    with pytest.raises(ValueError, match=r"mis_ext\.hosts\.slime\.prepare_rollout"):
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
    args = argparse.Namespace(**SCOPE)
    batches = [make_batch(seed=seed, noise=0.2) for seed in (1, 2)]
    for batch in batches:
        prepare_rollout(args, 0, {"log_probs": batch["train_log_probs"], **batch})
        log_ratio = torch.cat(batch["train_log_probs"]) - torch.cat(batch["rollout_log_probs"])
        mean = log_ratio.exp().clamp_max(2.0).mean()
        for other in batches:
            _, _, metrics = mis_ext.compute_mis_weights_with_cp(args, **other)
            torch.testing.assert_close(metrics["mis_batch_norm_factor"], mean.expand(160), rtol=1e-6, atol=0.0)


class FailingGroup:
    """A fault-tolerant group whose peer is gone: the work it returns reports a failure instead of raising."""

    _replica_id, _rank = 0, 0

    def size(self) -> int:
        return 2

    def fail(self, *_: object) -> argparse.Namespace:
        return argparse.Namespace(wait=lambda: False)

    allgather = allreduce = fail


def test_a_lost_peer_of_a_fault_tolerant_group_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="a peer is gone"):
        gather_rows(torch.ones(3), FailingGroup())
    with pytest.raises(RuntimeError, match="a peer is gone"):
        merge_bits(torch.ones(3, dtype=torch.uint8), FailingGroup())
