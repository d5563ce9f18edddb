# SPDX-License-Identifier: Apache-2.0
"""What the samples of one prompt share: their baseline before and after rejection, and the weight of their prompt."""

import argparse
import math
import random
from dataclasses import dataclass
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from reference_groups import GradedSample, advantages, loss_of_prompts
from thread_ranks import Rank, current_rank, run_ranks
from zigzag import take

import mis_ext
from mis_ext import group_advantages, group_rewards, prepare_rollout
from mis_ext.hosts.slime_miles import rollout as rollout_hook
from mis_ext.keys.reading import read_config
from mis_ext.loss.groups import prompt_factors, refuse_uncentered

LAYOUTS = {"one rank": (1, 1), "DP 2": (1, 2), "CP 2": (2, 1), "CP 2 x DP 2": (2, 2)}
layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
ESTIMATES = pytest.mark.parametrize("leave_one_out", [False, True], ids=["mean", "leave-one-out"])
DEVIATION = pytest.mark.parametrize("with_deviation", [False, True], ids=["no deviation", "deviation"])


def drawn(seed: int) -> list[GradedSample]:
    """Prompts of one to six trajectories, of one to three samples, in any order; some samples do not count."""
    chance = random.Random(seed)
    samples = [
        GradedSample(prompt, trajectory, reward, counts=chance.random() > 0.2)
        for prompt in (3, 5, 11)
        for trajectory in range(chance.randint(1, 6))
        for reward in [chance.choice([0.0, 0.5, 1.0])]
        for _ in range(chance.randint(1, 3))
    ]
    chance.shuffle(samples)
    return samples


@DEVIATION
@ESTIMATES
def test_an_advantage_is_over_the_trajectories_of_its_prompt_that_count(leave_one_out, with_deviation) -> None:
    for seed in range(20):
        samples = drawn(seed)
        prompt, trajectory, reward, counts, *_ = map(torch.tensor, zip(*samples, strict=True))
        settings = {"leave_one_out": leave_one_out, "with_deviation": with_deviation}
        found = group_advantages(reward.double(), prompt, trajectories=trajectory, counted=counts, **settings)
        expected = torch.tensor(advantages(samples, **settings), dtype=torch.float64)
        # A trajectory counts if one of its samples does.
        torch.testing.assert_close(found[counts], expected[counts])
        left_out = {} if with_deviation and not leave_one_out else settings
        own = [each._replace(trajectory=place, counts=True) for place, each in enumerate(samples)]
        torch.testing.assert_close(
            group_advantages(reward, prompt, **left_out).double(),
            torch.tensor(advantages(own, **settings), dtype=torch.float64),
            rtol=1e-6,
            atol=1e-6,
        )


def test_what_another_baseline_has_left_gives_the_same() -> None:
    prompt, reward = torch.tensor([0] * 5 + [1] * 3), torch.tensor([0.0, 1, 1, 0.5, 7, 2, 2, 3], dtype=torch.float64)
    counted = torch.tensor([True, True, False, True, True, True, False, True])
    for before in ({}, {"leave_one_out": True}, {"with_deviation": False}):
        left = group_advantages(reward, prompt, **before)
        anew, direct = (group_advantages(each, prompt, counted=counted) for each in (left, reward))
        # But for what is added to the deviation.
        torch.testing.assert_close(anew, direct, rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16])
def test_rewards_of_right_and_wrong_may_have_any_dtype(dtype) -> None:
    found = group_advantages(torch.tensor([1, 0, 1, 0]).to(dtype), torch.tensor([0, 0, 1, 1]))
    assert found.tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)] * 2, rel=1e-3)


def test_numbers_of_prompts_keep_their_digits_beside_floats() -> None:
    prompt = torch.tensor([2**24, 2**24, 2**24 + 1, 2**24 + 1])
    rewards, own = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.arange(4.0)
    assert torch.equal(group_advantages(rewards, prompt, trajectories=own), group_advantages(rewards, prompt))


def test_numbers_of_prompts_may_have_more_digits_than_a_float() -> None:
    near, far = torch.tensor([2**60, 2**60, 2**60 + 1, 2**60 + 1]), torch.tensor([0, 0, 1, 1])
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    assert torch.equal(group_advantages(rewards, near), group_advantages(rewards, far))


def test_an_infinite_reward_that_counts_is_refused() -> None:
    rewards, groups, counted = torch.tensor([1.0, math.inf, 0.0]), torch.zeros(3), torch.tensor([True, False, True])
    assert group_advantages(rewards, groups, counted=counted).isfinite().all()
    with pytest.raises(ValueError, match=r"rewards must be finite, got inf of samples \[1\]"):
        group_advantages(rewards, groups)


# --- rewards, as a host hands them over


@dataclass
class Sample:
    """What is read of the hosts' samples."""

    group_index: int | None
    reward: float | None
    rollout_id: int | None = None
    remove_sample: bool = False
    response_length: int = 3
    loss_mask: list[int] | None = None
    index: int | None = None

    def get_reward_value(self, args: argparse.Namespace) -> float | None:
        return self.reward


def host_args(**changes: Any) -> argparse.Namespace:
    host = {"advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": True}
    flags = {"custom_reward_post_process_path": "mis_ext.group_rewards", "rollout_data_postprocess_path": "a.b"}
    return argparse.Namespace(**host | flags | {"n_samples_per_prompt": 4, "use_tis": False} | changes)


FAN_OUT = [
    # Three samples of one trajectory, of a prompt of two; slime 2302.
    *(Sample(0, 1.0, rollout_id=7) for _ in range(3)),
    Sample(0, 0.0),
    # Another number of samples, and one that earned nothing because its environment failed.
    Sample(4, 1.0, rollout_id=0),
    Sample(4, 0.0),
    Sample(4, -1.0, remove_sample=True),
    Sample(4, -1.0, loss_mask=[0, 0, 0]),
    # Nor does its last turn say what the trajectory of the first earned.
    Sample(4, -1.0, rollout_id=0, remove_sample=True),
]


def test_a_trajectory_counts_once_and_what_is_not_trained_does_not() -> None:
    raw, found = group_rewards(host_args(grpo_std_normalization=False), FAN_OUT)
    assert raw == [1.0, 1.0, 1.0, 0.0, 1.0, 0.0, -1.0, -1.0, -1.0]
    assert found == [0.5, 0.5, 0.5, -0.5, 0.5, -0.5, 0.0, 0.0, 0.5]
    with_empty = [*FAN_OUT, Sample(4, -1.0, response_length=0)]
    assert group_rewards(host_args(grpo_std_normalization=False), with_empty)[1] == [*found, 0.0]
    _, found = group_rewards(host_args(), FAN_OUT)
    half = 0.5**0.5
    assert found == pytest.approx([half, half, half, -half, half, -half, 0.0, 0.0, half], rel=1e-5)


def test_all_count_where_the_key_says_so_and_others_alone_are_compared() -> None:
    args = host_args(grpo_std_normalization=False, mis_group_over="all", mis_group_baseline="leave_one_out")
    _, found = group_rewards(args, FAN_OUT[:-1])
    assert found == pytest.approx([1.0, 1.0, 1.0, -1.0, 1 + 2 / 3, 1 / 3, -1.0, -1.0])
    # As the host: no deviation with this estimator.
    args = host_args(advantage_estimator="reinforce_plus_plus_baseline")
    assert group_rewards(args, FAN_OUT)[1][:4] == [0.5, 0.5, 0.5, -0.5]


@DEVIATION
@pytest.mark.parametrize("over", ["all", "trained", "kept"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
def test_rewards_and_rollout_together_apply_the_baseline_once(baseline, over, with_deviation) -> None:
    """From rewards to the advantages that are trained; of five samples one is not trained, and one is rejected."""
    rewards, trained, kept = (
        [1.0, 0.0, 0.5, 0.0, 7.0],
        [True, True, True, True, False],
        [True, True, False, True, False],
    )
    keys = {"mis_group_baseline": baseline, "mis_group_over": over, "grpo_std_normalization": with_deviation}
    args = host_args(**GATE | BAND | keys, n_samples_per_prompt=5)
    samples = [
        Sample(0, reward, rollout_id=place, index=place, remove_sample=not counts)
        for place, (reward, counts) in enumerate(zip(rewards, trained, strict=True))
    ]
    raw, found = group_rewards(args, samples)
    assert raw == rewards
    log_probs = [torch.full((3,), -1.0)] * 5
    rollout = {
        "log_probs": log_probs,
        "rollout_log_probs": [each - (0.0 if stays else 0.3) for each, stays in zip(log_probs, kept, strict=True)],
        "loss_masks": [torch.full((3,), int(counts)) for counts in trained],
        "total_lengths": [5] * 5,
        "response_lengths": [3] * 5,
        "advantages": [torch.full((3,), each) for each in found],
        "rewards": found,
        "sample_indices": [*range(5)],
        "rollout_ids": [*range(5)],
    }
    prepare_rollout(args, 0, rollout)
    counts = {"all": [True] * 5, "trained": trained, "kept": kept}[over]
    graded = [GradedSample(0, *each) for each in zip(range(5), rewards, counts, strict=True)]
    expected = advantages(graded, leave_one_out=baseline == "leave_one_out", with_deviation=with_deviation)
    assert [float(each[0]) for each in rollout["advantages"]] == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_samples_without_a_rollout_are_told_apart_by_their_number() -> None:
    samples = [Sample(0, 1.0, index=7), Sample(0, 1.0, index=7), Sample(0, 0.0, index=8), Sample(0, 0.5)]
    assert group_rewards(host_args(grpo_std_normalization=False), samples)[1] == [0.5, 0.5, -0.5, 0.0]
    # Also where the number is the rollout of another one, with another reward or, which nobody would see, the same.
    samples = [Sample(0, 1.0, rollout_id=8), Sample(0, 1.0, rollout_id=8), Sample(0, 0.0, index=8)]
    assert group_rewards(host_args(grpo_std_normalization=False), samples)[1] == [0.5, 0.5, -0.5]
    samples = [Sample(0, 1.0, rollout_id=8), Sample(0, 1.0, index=8), Sample(0, 0.25, index=9)]
    assert group_rewards(host_args(grpo_std_normalization=False), samples)[1] == [0.25, 0.25, -0.5]
    # That of another prompt is none of theirs, and a sample's own says the same as its number.
    samples = [Sample(0, 1.0, index=7), Sample(0, 1.0, index=7, rollout_id=7), Sample(0, 0.0, index=8)]
    samples += [Sample(1, 1.0, index=20, rollout_id=8), Sample(1, 0.0, index=21, rollout_id=9)]
    assert group_rewards(host_args(grpo_std_normalization=False), samples)[1] == [0.5, 0.5, -0.5, 0.5, -0.5]


@pytest.mark.parametrize("kind", [np.bool_, Decimal, torch.tensor])
def test_a_reward_may_be_of_any_type_that_is_a_number(kind) -> None:
    samples = [Sample(0, kind(True)), Sample(0, kind(False))]
    assert group_rewards(host_args(grpo_std_normalization=False), samples)[1] == [0.5, -0.5]


def test_rewards_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match=r"samples \[1\] have no group_index"):
        group_rewards(host_args(), [Sample(0, 1.0), Sample(None, 1.0)])
    with pytest.raises(ValueError, match=r"samples \[0, 2\] have no reward, got None: the reward function must give"):
        group_rewards(host_args(), [Sample(0, None), Sample(0, 1.0), Sample(0, None, remove_sample=True)])
    with pytest.raises(
        ValueError, match=r"samples \[1\] have no reward, got {'accuracy': 1.0}: .* --reward-key selects"
    ):
        group_rewards(host_args(), [Sample(0, 1.0), Sample(0, {"accuracy": 1.0})])
    with pytest.raises(ValueError, match=r"rewards must be finite, got nan of samples \[2\]"):
        group_rewards(host_args(), [Sample(0, 1.0), Sample(0, math.inf, remove_sample=True), Sample(0, math.nan)])
    for flag in ({"advantage_estimator": "ppo"}, {"rewards_normalization": False}):
        with pytest.raises(ValueError, match=r"mis_group_baseline='mean': no effect, because --(advantage|disable)"):
            group_rewards(host_args(**flag), [Sample(0, 1.0), Sample(0, 0.0)])
    with pytest.raises(ValueError, match="trajectory 7 of prompt 2 has samples with rewards 0 and 1"):
        group_rewards(
            host_args(), [Sample(2, reward, rollout_id=place) for reward, place in ((1.0, 7), (0.0, 7), (0.0, 8))]
        )


def test_equal_rewards_have_no_advantage_and_their_rounding_is_not_refused() -> None:
    prompt = torch.arange(2).repeat_interleave(8)
    raw = torch.tensor([-0.1, 1.0] * 4 + [-0.1] * 8)
    assert group_advantages(raw.double(), prompt)[8:].tolist() == [0.0] * 8
    # As the hosts normalize, in float32.
    centered = raw.reshape(2, 8) - raw.reshape(2, 8).mean(-1, keepdim=True)
    left = (centered / (centered.std(-1, keepdim=True) + 1e-6)).flatten().double()
    left[8:] = 0.00745
    refuse_uncentered(left, prompt.double(), torch.arange(16.0))
    # No rank has a sample.
    refuse_uncentered(*[torch.zeros(0, dtype=torch.float64)] * 3)
    assert group_advantages(left, prompt)[8:].tolist() == [0.0] * 8
    # What does not count differs.
    rewards = torch.tensor([0.1, 0.1, 0.1, 5.0], dtype=torch.float64)
    assert group_advantages(rewards, torch.zeros(4), counted=rewards < 1.0).tolist() == [0.0] * 4
    # Of large rewards the rounding is large too.
    refuse_uncentered(torch.tensor([-1e4, 10000.5]).double(), torch.zeros(2), torch.arange(2.0))
    # Had the host compared them with others, or dropped some: raw rewards, deviations, and none of both is rounding.
    for reward in (1.0, 0.75, 2.0, 7**0.5, 0.5**-0.5, 100.1, 12345.6):
        left[8:] = reward
        with pytest.raises(ValueError, match="the 8 trajectories of prompt 1"):
            refuse_uncentered(left, prompt.double(), torch.arange(16.0).double())


@pytest.mark.parametrize("number", [3, 8, 12, 24, 33, 128])
@pytest.mark.parametrize("reward", [0.1, 8.1, 9.9, -33.3, 100.1, 1000.1, 12345.6])
def test_what_a_host_leaves_of_large_equal_rewards_is_not_refused(reward, number) -> None:
    raw = torch.full((number,), reward)
    for with_deviation in (False, True):
        left = raw - raw.mean()
        left = left / (left.std() + 1e-6) if with_deviation else left
        refuse_uncentered(left.double(), torch.zeros(number), torch.arange(float(number)))


# --- the scored rollout, on ranks

GATE = {"use_tis": True, "tis_level": "none", "use_rs": True, "rs_level": "geometric"}
BAND = {"rs_lower_bound": 0.9, "rs_upper_bound": 1.1}
LENGTHS = [5, 17, 3, 9, 12, 4, 8, 6, 11]
PROMPTS = [0, 0, 0, 0, 0, 1, 1, 1, 1]
# The second trajectory has two samples. Prompt 0 has samples in both steps.
TRAJECTORIES = [0, 1, 1, 2, 3, 4, 5, 6, 7]
INDICES = [0, 1, 1, 2, 3, 4, 5, 6, 7]
REWARDS = [0.0, 1.0, 1.0, 0.5, 0.0, 1.0, 0.0, 1.0, 0.0]
REJECTED = (0, 2, 6)
STEPS = [0, 0, 0, 0, 1, 1, 1, 1, 1]
# Of each data-parallel rank, by step.
SHARDS = {1: [([0, 1, 2, 3], [4, 5, 6, 7, 8])], 2: [([0, 2], [5, 8, 6]), ([3, 1], [7, 4])]}


def whole_rollout() -> dict[str, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    train = [-torch.rand(length, generator=generator) - 0.5 for length in LENGTHS]
    rollout = [each - (0.3 if place in REJECTED else 0.01) for place, each in enumerate(train)]
    masks = [torch.ones(length, dtype=torch.int32) for length in LENGTHS]
    masks[3][2:5] = 0
    return {"log_probs": train, "rollout_log_probs": rollout, "loss_masks": masks}


def samples_of(keys: dict[str, Any], masks: list[torch.Tensor]) -> list[GradedSample]:
    over_kept = keys.get("mis_group_over") == "kept"
    tokens = [float(mask.sum()) for mask in masks]
    rejected = REJECTED if keys.get("use_tis", True) else ()
    kept = [0 if place in rejected else count for place, count in enumerate(tokens)]
    counts = [not over_kept or count > 0 for count in kept]
    return [
        GradedSample(*each) for each in zip(PROMPTS, TRAJECTORIES, REWARDS, counts, STEPS, kept, tokens, strict=True)
    ]


def data_of(rank: Rank, whole: dict[str, list[torch.Tensor]], rewards: list[float]) -> dict[str, Any]:
    """This rank's rollout data, as slime has them when the hook is called."""
    by_step = SHARDS[rank.groups.dp_size][rank.dp_rank]
    places = [place for step in by_step for place in step]
    totals = [LENGTHS[place] + 3 + place for place in places]
    where = {"total_lengths": totals, "cp_rank": rank.cp_rank, "cp_size": rank.groups.cp_size}
    mine = {name: [whole[name][place] for place in places] for name in whole}
    for name in ("log_probs", "rollout_log_probs"):
        mine[name] = take(mine[name], **where)
    sums = [sum(float(whole["loss_masks"][j].sum()) for j in range(9) if TRAJECTORIES[j] == t) for t in TRAJECTORIES]
    counts = [len(step) for step in by_step]
    return mine | {
        "total_lengths": totals,
        "response_lengths": [LENGTHS[place] for place in places],
        "rewards": [rewards[place] for place in places],
        "advantages": [torch.full_like(each, rewards[j]) for each, j in zip(mine["log_probs"], places, strict=True)],
        "sample_indices": [INDICES[place] for place in places],
        "rollout_ids": [TRAJECTORIES[place] for place in places],
        "rollout_mask_sums": torch.tensor([sums[place] for place in places]),
        # One micro-batch in the first step, two in the second.
        "num_microbatches": [1, 2],
        "micro_batch_indices": [[*range(counts[0])], [counts[0]], [*range(counts[0] + 1, sum(counts))]],
        "global_batch_sizes": [3, 5],
        "places": places,
    }


def host_loss(rank: Rank, args: argparse.Namespace, data: dict[str, Any], *, step: int) -> float:
    """What slime makes of a loss of minus the advantage on every token: this rank's part."""
    total = 0.0
    for place, whole_place in enumerate(data["places"]):
        if STEPS[whole_place] != step:
            continue
        lists = {
            "train_log_probs": data["log_probs"],
            **{name: data[name] for name in ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")},
        }
        sample = {name: each[place : place + 1] for name, each in lists.items()}
        # Ranks have other numbers of samples: they are not called together.
        state = SimpleNamespace(cp=rank.parallel_state.cp, intra_dp=SimpleNamespace(rank=0, size=1, group=None))
        pg_loss, masks, _ = mis_ext.compute_mis_weights_with_cp(
            args, **sample, pg_loss=-data["advantages"][place], parallel_state=state, max_seq_lens=None
        )
        where = {"cp_rank": rank.cp_rank, "cp_size": rank.groups.cp_size, "total_lengths": sample["total_lengths"]}
        (mask,) = take(masks, **where)
        divisor = 1.0 if args.calculate_per_token_loss else max(float(data["rollout_mask_sums"][place]), 1.0)
        total += float((pg_loss.double() * mask).sum()) / divisor
    return total


KEYS: dict[str, dict[str, Any]] = {
    "kept": {"mis_group_over": "kept"},
    "kept, leave-one-out": {"mis_group_over": "kept", "mis_group_baseline": "leave_one_out"},
    "prompts": {"mis_prompt_mean": True},
    "both": {"mis_group_over": "kept", "mis_prompt_mean": True},
    "both, no deviation": {"mis_group_over": "kept", "mis_prompt_mean": True, "grpo_std_normalization": False},
    "both, by tokens": {"mis_group_over": "kept", "mis_prompt_mean": True, "calculate_per_token_loss": True},
    "prompts, nothing corrected": {"mis_prompt_mean": True, "use_tis": False},
}


@layouts
@pytest.mark.parametrize("scale", [None, 1.0, 0.02], ids=["whole masks", "fractional", "sums below 1"])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_the_loss_of_a_step_is_that_of_its_prompts(layout, keys, scale) -> None:
    cp_size, dp_size = layout
    whole = whole_rollout()
    if scale is not None:
        shares = torch.Generator().manual_seed(2)
        whole["loss_masks"] = [
            mask * (scale * (0.1 + torch.rand(len(mask), generator=shares))) for mask in whole["loss_masks"]
        ]
    with_deviation = keys.get("grpo_std_normalization", True)
    every = [each._replace(counts=True) for each in samples_of({}, whole["loss_masks"])]
    before = advantages(every, leave_one_out=False, with_deviation=with_deviation)

    def on_rank(rank: Rank) -> list[float]:
        corrects = GATE | BAND if keys.get("use_tis", True) else {}
        args = host_args(**{"calculate_per_token_loss": False} | corrects | keys)
        data = data_of(rank, whole, before)
        prepare_rollout(args, 0, data)
        return [host_loss(rank, args, data, step=step) for step in (0, 1)]

    parts = run_ranks(on_rank, cp_size=cp_size, dp_size=dp_size)
    assert all(isinstance(part, list) for part in parts), parts
    samples = samples_of(keys, whole["loss_masks"])
    now = before
    if "mis_group_over" in keys:
        leaves_out = keys.get("mis_group_baseline") == "leave_one_out"
        now = advantages(samples, leave_one_out=leaves_out, with_deviation=with_deviation)
    losses = [-advantage * each.kept for advantage, each in zip(now, samples, strict=True)]
    for step, rollouts in enumerate((3, 5)):
        found = sum(part[step] for part in parts)
        if keys.get("mis_prompt_mean"):
            terms = rollouts
            if keys.get("calculate_per_token_loss"):
                terms = sum(max(each.tokens, 1.0) for each in samples if each.step == step)
            expected = terms * loss_of_prompts(samples, losses, step=step)
        else:
            sums = {t: sum(each.tokens for each in samples if each.trajectory == t) for t in TRAJECTORIES}
            expected = sum(
                loss / max(sums[each.trajectory], 1.0)
                for each, loss in zip(samples, losses, strict=True)
                if each.step == step
            )
        assert found == pytest.approx(expected, rel=2e-5)


@layouts
def test_a_rank_whose_samples_are_wrong_is_named_on_all_others(layout) -> None:
    cp_size, dp_size = layout
    whole, failing = whole_rollout(), cp_size * dp_size - 1
    before = advantages(samples_of({}, whole["loss_masks"]), leave_one_out=False, with_deviation=True)

    def on_rank(rank: Rank) -> None:
        data = data_of(rank, whole, before)
        if rank.number == failing:
            data["rollout_log_probs"][1] = data["rollout_log_probs"][1].new_zeros(40)
        prepare_rollout(host_args(**GATE | BAND, mis_group_over="kept"), 0, data)

    for number, outcome in enumerate(run_ranks(on_rank, cp_size=cp_size, dp_size=dp_size)):
        assert isinstance(outcome, ValueError if number == failing else RuntimeError)
        assert ("rollout_log_probs has samples" if number == failing else f"failed on rank {failing};") in str(outcome)


def test_an_error_behind_the_correction_of_a_rollout_is_named_on_the_other_replica() -> None:
    whole, right = whole_rollout(), rollout_hook.unpack

    def broken(*args: Any) -> Any:
        if current_rank() == 1:
            raise torch.OutOfMemoryError("out of memory, says the test")
        return right(*args)

    def on_rank(rank: Rank) -> None:
        prepare_rollout(host_args(**GATE | BAND, mis_group_over="kept"), 0, data_of(rank, whole, REWARDS))

    with mock.patch.object(rollout_hook, "unpack", broken):
        good, bad = run_ranks(on_rank, dp_size=2)
    assert isinstance(bad, torch.OutOfMemoryError)
    assert "failed on rank 1;" in str(good)


def test_a_rank_with_fewer_rewards_is_named_on_the_other() -> None:
    whole = whole_rollout()
    before = advantages(samples_of({}, whole["loss_masks"]), leave_one_out=False, with_deviation=True)

    def on_rank(rank: Rank) -> None:
        data = data_of(rank, whole, before)
        if rank.number == 1:
            data["rewards"] = data["rewards"][:-1]
        prepare_rollout(host_args(**GATE | BAND, mis_group_over="kept"), 0, data)

    other, failing = run_ranks(on_rank, dp_size=2)
    assert isinstance(failing, ValueError)
    assert "loss_masks, but the other lists have {'rewards'" in str(failing)
    assert isinstance(other, RuntimeError)
    assert "failed on rank 1;" in str(other)


@pytest.mark.parametrize("dp_size", [1, 2])
def test_rewards_that_were_compared_with_others_are_refused_on_every_rank(dp_size) -> None:
    """slime takes all samples for one prompt where their number is not what it expects (slime 1414)."""
    whole = whole_rollout()
    together = [
        each._replace(prompt=0, trajectory=place) for place, each in enumerate(samples_of({}, whole["loss_masks"]))
    ]
    before = advantages(together, leave_one_out=False, with_deviation=True)

    def on_rank(rank: Rank) -> None:
        prepare_rollout(host_args(**GATE | BAND, mis_group_over="kept"), 0, data_of(rank, whole, before))

    for outcome in run_ranks(on_rank, dp_size=dp_size):
        assert isinstance(outcome, ValueError)
        assert "mis_ext.group_rewards" in str(outcome)


def test_without_a_correction_the_samples_that_are_trained_are_kept() -> None:
    whole = whole_rollout()
    whole["loss_masks"][6].zero_()
    before = advantages(samples_of({}, whole["loss_masks"]), leave_one_out=False, with_deviation=True)

    def on_rank(rank: Rank) -> list[torch.Tensor]:
        data = data_of(rank, whole, before)
        # Nobody has scored it.
        del data["log_probs"]
        prepare_rollout(host_args(mis_group_over="kept"), 0, data)
        return data["advantages"]

    (found,) = run_ranks(on_rank)
    samples = samples_of({}, whole["loss_masks"])
    samples[6] = samples[6]._replace(counts=False)
    now = advantages(samples, leave_one_out=False, with_deviation=True)
    assert [float(each[0]) for place, each in enumerate(found) if place != 6] == pytest.approx(
        [each for place, each in enumerate(now) if place != 6], rel=1e-5
    )


def test_a_rollout_that_lacks_something_is_refused() -> None:
    (rank,) = run_ranks(lambda rank: rank)
    whole = whole_rollout()
    args = host_args(mis_prompt_mean=True)
    for name in ("micro_batch_indices", "advantages"):
        data = data_of(rank, whole, REWARDS)
        del data[name]
        with pytest.raises(ValueError, match=f"mis_prompt_mean: true: rollout_data has no {name}"):
            prepare_rollout(args, 0, data)
    data = data_of(rank, whole, REWARDS)
    data["rollout_mask_sums"][2] = torch.nan
    with pytest.raises(ValueError, match="rollout_mask_sums has values from nan"):
        prepare_rollout(args, 0, data)
    data = data_of(rank, whole, REWARDS) | {"sample_indices": [None] * 9}
    with pytest.raises(ValueError, match="samples have no index"):
        prepare_rollout(args, 0, data)
    # Miles gives none at all.
    with pytest.raises(ValueError, match="mis_prompt_mean: true: Miles passes no rollout data"):
        prepare_rollout(args)


@pytest.mark.parametrize("whole_loss", [False, True], ids=["hook", "whole loss"])
def test_the_loss_notices_that_nobody_prepared_the_rollout(whole_loss) -> None:
    """As where a function of the user's at the flag does not call ours."""
    args = host_args(mis_prompt_mean=True, use_tis=True, tis_upper_bound=2.0, loss_type="custom_loss")
    lengths = {"total_lengths": [6, 8], "response_lengths": [4, 5]}
    log_probs = [-torch.rand(length) for length in (4, 5)]
    masks = [torch.ones(length, dtype=torch.int32) for length in (4, 5)]
    given = {"rollout_log_probs": log_probs, "loss_masks": masks} | lengths

    def step() -> None:
        if whole_loss:
            tokens = [torch.zeros(length, dtype=torch.long) for length in (6, 8)]
            batch = given | {"log_probs": log_probs, "advantages": log_probs, "unconcat_tokens": tokens}
            mis_ext.policy_loss(args, batch, torch.zeros(1, 14, 3))
        else:
            mis_ext.compute_mis_weights_with_cp(args, pg_loss=torch.zeros(9), train_log_probs=log_probs, **given)

    with pytest.raises(ValueError, match=r"mis_prompt_mean: true: mis_ext\.prepare_rollout was not called before"):
        step()
    schedule = {"global_batch_sizes": [2], "num_microbatches": [1], "micro_batch_indices": [[0, 1]]}
    of_samples = {"rewards": [1.0, -1.0], "sample_indices": [0, 1], "rollout_ids": [0, 1]}
    prepare_rollout(args, 0, given | {"log_probs": log_probs, "advantages": log_probs} | schedule | of_samples)
    step()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a critic": ({"mis_group_baseline": "mean", "advantage_estimator": "ppo"}, "compares no rewards"),
    "no normalization": (
        {"mis_group_over": "all", "rewards_normalization": False},
        "because --disable-rewards-normalization",
    ),
    "whitened": (
        {"mis_group_over": "kept", "normalize_advantages": True},
        "with normalize_advantages, advant",
    ),
    "whitened by name": (
        {"mis_group_over": "kept", "advantage_estimator": "reinforce_plus_plus_baseline"},
        "with --advantage-estimator reinforce_plus_plus_baseline",
    ),
    "a method that is not linear in advantages": (
        {"mis_prompt_mean": True, "loss_type": "custom_loss", "mis_loss_method": "kl_cov"},
        "mis_loss_method: kl_cov compares their size",
    ),
    "the same with parameters": (
        {"mis_prompt_mean": True, "loss_type": "custom_loss", "mis_loss_method": {"name": "maspo", "scale": 2.0}},
        "mis_loss_method: maspo compares their size",
    ),
    "two denominators": (
        {"mis_prompt_mean": True, "use_tis": True, "mis_denominator": "kept"},
        "mis_prompt_mean: true and mis_denominator: kept are two denominators",
    ),
    "a denominator of the loss": (
        {"mis_prompt_mean": True, "mis_loss_denominator": "constant"},
        "and mis_loss_denominator: constant are two",
    ),
    "no function of rewards": (
        {"mis_group_baseline": "leave_one_out", "custom_reward_post_process_path": None},
        "mis_group_baseline='leave_one_out': no effect, because --custom-reward-post-process-path is not set; give it",
    ),
    "a word": ({"mis_group_baseline": "median"}, "mis_group_baseline must be one of"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_contradicts_a_key_is_refused_by_name(name) -> None:
    keys, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        read_config(vars(host_args(**keys)), whole_loss=False)


def test_a_file_alone_is_not_asked_for_flags_and_a_loop_of_ones_own_is_told_that_nothing_reads_them() -> None:
    found = read_config({"mis_group_over": "kept", "mis_prompt_mean": True}, whole_loss=False).group
    assert (found.over, found.prompt_mean, found.needs_rollout) == ("kept", True, "mis_group_over: kept")
    kept = {"mis_group_over": "kept", "mis_group_baseline": "leave_one_out", "custom_reward_post_process_path": None}
    assert read_config(vars(host_args(**kept)), whole_loss=False).group.baseline == "leave_one_out"
    assert read_config({"use_tis": True}, whole_loss=False).group.needs_rollout is None
    for use in (mis_ext.Session, lambda keys: mis_ext.policy_loss_from_log_probs(keys, **_loss())):
        with pytest.raises(ValueError, match="mis_prompt_mean=True: no effect"):
            use({"mis_prompt_mean": True})


def _loss() -> dict[str, torch.Tensor]:
    names = ("current_logprobs", "behavior_logprobs", "advantages", "response_mask")
    return {name: torch.ones(1, 3) for name in names}


def test_a_prompt_without_a_kept_token_has_no_weight() -> None:
    """With the current policy the loss may keep tokens that prepare_rollout rejected."""
    two = torch.tensor([500.0, 500.0])
    factor_N = prompt_factors(
        group_N=torch.tensor([0.0, 1.0]),
        step_N=torch.zeros(2),
        kept_N=torch.tensor([0.0, 400.0]),
        tokens_N=two,
        divisor_N=two,
        terms_N=torch.tensor([2.0, 2.0]),
    )
    assert factor_N.tolist() == [0.0, 2.5]
