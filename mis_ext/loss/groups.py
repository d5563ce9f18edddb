# SPDX-License-Identifier: Apache-2.0
"""Quantities of one prompt: the baseline of the advantages of its responses, and its weight.

With rewards ``R_j`` of the trajectories ``j`` that count, and ``S`` their sample standard deviation:

    mean            A_i = (R_i - mean_j R_j) / (S + 1e-6)
    leave-one-out   A_i = (R_i - mean_{j != i} R_j) / (S + 1e-6)

Both are linear in the rewards, up to a factor and a constant of the prompt. So they can be computed from the output of
another baseline, over other trajectories.

A trajectory may consist of several samples (turns, sub-agents), each with the reward. It still counts once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mis_ext.validation import check_tensors

EPSILON = 1e-6
"""The frameworks add this to a standard deviation."""
_CENTERED = 1e-4
"""The mean of rewards that were centered in float32 is at most this times the largest reward."""
_ROUNDED = 0.5
"""Equal float32 rewards up to 4 leave at most 2^-22 after rounding, divided by a standard deviation of 0 plus EPSILON.
Larger rewards leave more: a power of two divided by EPSILON, or a sum of a few of these.
"""


@torch.no_grad()
def group_advantages(
    rewards: Tensor,
    groups: Tensor,
    *,
    trajectories: Tensor | None = None,
    counted: Tensor | None = None,
    leave_one_out: bool = False,
    with_deviation: bool = True,
) -> Tensor:
    """Compute the advantage ``[N]`` of each sample over the counted trajectories of its prompt.

    It is 0 for a trajectory that does not count, and for the only one that counts in its prompt.

    Args:
        rewards: ``[N]``, per sample. The advantages have their dtype, or float32 for integers.
        groups: ``[N]``, the prompt of each sample.
        trajectories: ``[N]``, the trajectory of each sample of a prompt. None: each sample is one trajectory.
        counted: ``[N]`` bool, False for a sample that is not trained. A trajectory counts if one of its samples does.
            None: all count.
        leave_one_out: Whether a trajectory is compared only with the other trajectories.
        with_deviation: Whether the difference is divided by the standard deviation of all counted trajectories.

    Raises:
        ValueError: Counted samples of a trajectory have different rewards, a reward is not finite, or a shape is wrong.

    References:
        Shao et al., DeepSeekMath (GRPO), arXiv:2402.03300; Ahmadian et al., Back to Basics (RLOO), arXiv:2402.14740.
    """
    more = {"trajectories": trajectories, "counted": counted}
    given = {"rewards": rewards, "groups": groups} | {name: each for name, each in more.items() if each is not None}
    check_tensors(given)
    shapes = [[*each.shape] for each in given.values()]
    if any(shape != [rewards.numel()] for shape in shapes):
        raise ValueError(f"rewards, groups, trajectories and counted must be [N], got {shapes}")
    rewards_N = rewards.double()
    own_N = torch.arange(len(rewards), device=rewards.device) if trajectories is None else trajectories
    pairs_K, trajectory_N = _distinct(groups, own_N)
    (prompts_G,), prompt_K = _distinct(pairs_K[0])
    counted_N = torch.ones_like(rewards_N) if counted is None else (counted != 0).double()
    (wrong_M,) = ((counted_N > 0.0) & ~rewards_N.isfinite()).nonzero(as_tuple=True)
    if len(wrong_M):
        raise ValueError(
            f"rewards must be finite, got {float(rewards_N[wrong_M[0]])} of samples {wrong_M[:8].tolist()}"
        )

    def of_trajectories(values_N: Tensor, how: str) -> Tensor:
        found_K = values_N.new_zeros(len(prompt_K))
        return found_K.scatter_reduce(0, trajectory_N, values_N, how, include_self=False)

    counts_K = of_trajectories(counted_N, "amax")
    # Samples that do not count do not determine the reward of their trajectory.
    highest_K, lowest_K = (
        torch.where(counts_K > 0.0, of_trajectories(torch.where(counted_N > 0.0, rewards_N, other), how), 0.0)
        for how, other in (("amax", -torch.inf), ("amin", torch.inf))
    )
    if bool((highest_K != lowest_K).any()):
        worst = int((highest_K - lowest_K).argmax())
        raise ValueError(
            f"trajectory {int(pairs_K[1, worst])} of prompt {int(pairs_K[0, worst])} has samples with rewards "
            f"{float(lowest_K[worst]):g} and {float(highest_K[worst]):g}: give all samples of a trajectory its reward"
        )
    reward_K = highest_K

    def sums(values_K: Tensor) -> Tensor:
        return reward_K.new_zeros(len(prompts_G)).index_add(0, prompt_K, values_K)[prompt_K]

    number_K, total_K = sums(counts_K), sums(counts_K * reward_K)
    # The rounding error of a mean of equal rewards, divided by EPSILON, would become an advantage.
    is_equal_K = _are_equal(reward_K, prompt_K, counts_K > 0.0)[prompt_K]
    difference_K = torch.where(is_equal_K, 0.0, reward_K - total_K / number_K.clamp_min(1.0))
    deviation_K = (sums(counts_K * difference_K.square()) / (number_K - 1.0).clamp_min(1.0)).sqrt()
    if leave_one_out:
        # R_i - (sum - R_i) / (n - 1) = n / (n - 1) (R_i - mean)
        difference_K = difference_K * number_K / (number_K - 1.0).clamp_min(1.0)
    if with_deviation:
        difference_K = difference_K / (deviation_K + EPSILON)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.float32
    return torch.where(counts_K > 0.0, difference_K, 0.0)[trajectory_N].to(dtype)


def refuse_uncentered(rewards_N: Tensor, group_N: Tensor, trajectory_N: Tensor) -> None:
    """Raise an error if the mean of a prompt's trajectories was not subtracted from their rewards.

    Raises:
        ValueError: The mean of a prompt is not 0.
    """
    pairs_K, place_N = _distinct(group_N, trajectory_N)
    reward_K = rewards_N.new_zeros(pairs_K.shape[1]).index_copy(0, place_N, rewards_N)
    (prompts_G,), prompt_K = _distinct(pairs_K[0])
    total_G, number_G = (
        rewards_N.new_zeros(len(prompts_G)).index_add(0, prompt_K, each)
        for each in (reward_K, torch.ones_like(reward_K))
    )
    mean_G = total_G / number_G
    # Equal rewards leave 0 or a rounding error over EPSILON, which does not show what was subtracted.
    is_equal_G = _are_equal(reward_K, prompt_K, torch.ones_like(prompt_K, dtype=torch.bool))
    eighths_G = torch.frexp(mean_G * EPSILON).mantissa * 8.0
    is_rounding_G = (mean_G.abs() <= _ROUNDED) | ((eighths_G - eighths_G.round()).abs() <= 8e-6)
    mean_G = torch.where(is_equal_G & is_rounding_G, 0.0, mean_G)
    if len(mean_G) == 0 or float(mean_G.abs().max()) <= _CENTERED * float(rewards_N.abs().max()):
        return
    worst = int(mean_G.abs().argmax())
    raise ValueError(
        f"mis_group_over: kept: the {int(number_G[worst])} trajectories of prompt {int(prompts_G[worst])} have "
        f"rewards with the mean {float(mean_G[worst]):.3g}, not 0: the framework compared them with other "
        "trajectories, or dropped some. Set --custom-reward-post-process-path mis_ext.group_rewards, and a global "
        "batch size that divides the rollouts"
    )


def prompt_factors(
    *, group_N: Tensor, step_N: Tensor, kept_N: Tensor, tokens_N: Tensor, divisor_N: Tensor, terms_N: Tensor | None
) -> Tensor:
    """``[N]``: the factor of the loss of each sample that gives every prompt of a step the same weight.

    The framework computes ``1 / terms * sum_i 1 / divisor_i * sum_t l_it``. With the factors it is a mean over the
    prompts that have a kept token, each the mean of its kept tokens, weighted by their mask. A prompt of several steps
    counts as one prompt in each step.

    Args:
        group_N: The prompt of each sample.
        step_N: The optimizer step that it is trained in.
        kept_N: The sum of the mask over its kept tokens.
        tokens_N: The sum of its mask.
        divisor_N: The framework's divisor of its sum.
        terms_N: The framework's divisor of the sum over all samples of its step. None: only the tokens of the step.
    """
    (steps_P, _), place_N = _distinct(step_N, group_N)
    (steps_U,), step_P = _distinct(steps_P)
    zeros_P, zeros_U = kept_N.new_zeros(len(steps_P)), kept_N.new_zeros(len(steps_U))
    kept_P = zeros_P.index_add(0, place_N, kept_N)
    prompts_P = zeros_U.index_add(0, step_P, (kept_P > 0).to(kept_P.dtype))[step_P]
    if terms_N is None:
        # As in the frameworks, the sum of a sample's mask is at least 1.
        of_step_P = zeros_U.index_add(0, step_P, zeros_P.index_add(0, place_N, tokens_N.clamp_min(1.0)))[step_P]
        scale_N = of_step_P[place_N]
    else:
        scale_N = divisor_N * terms_N
    # 0 for a prompt without a kept token. With the current policy, the loss may keep tokens that the rollout rejected.
    share_P = torch.where(kept_P > 0, 1.0 / (prompts_P * kept_P), 0.0)
    return scale_N * share_P[place_N]


def _are_equal(reward_K: Tensor, prompt_K: Tensor, counts_K: Tensor) -> Tensor:
    """``[G]`` bool: whether all rewards of a prompt that count are the same."""
    number = int(prompt_K.max()) + 1 if len(prompt_K) else 0
    highest_G, lowest_G = (
        reward_K.new_full((number,), other).scatter_reduce(0, prompt_K, torch.where(counts_K, reward_K, other), how)
        for how, other in (("amax", -torch.inf), ("amin", torch.inf))
    )
    return highest_G == lowest_G


def _distinct(*keys_N: Tensor) -> tuple[Tensor, Tensor]:
    """``[keys, K]``, the distinct columns, sorted; ``[N]``, the index of each column in them."""
    # Stacked with float32, an integer would become float32 too, and lose digits.
    keys_N = tuple(each.double() if each.is_floating_point() else each.long() for each in keys_N)
    found: tuple[Tensor, Tensor] = torch.unique(torch.stack(keys_N), dim=1, return_inverse=True)
    return found
