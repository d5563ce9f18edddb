# SPDX-License-Identifier: Apache-2.0
"""Hooks of a whole rollout: rewards (slime and Miles), and values that need all of it before training (slime)."""

from __future__ import annotations

import logging
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from torch import Tensor

from mis_ext.correction.collectives import Due, Message, gather_rows
from mis_ext.correction.layout import PackedStreams
from mis_ext.hosts.groups import Groups, device_of, find_groups, initialized_megatron
from mis_ext.hosts.guards import raise_if_failed
from mis_ext.hosts.packing import (
    MASK_SUMS,
    check_samples,
    device_of_rollout,
    is_absent,
    pack_rollout,
    stack_mask_sums,
    unpack,
)
from mis_ext.hosts.session import Session, all_arguments, read_argument, shared_run
from mis_ext.keys.reading import GroupConfig, RunConfig, read_group
from mis_ext.loss.groups import group_advantages, prompt_factors, refuse_uncentered
from mis_ext.rollout.custom_generate.host import VERSIONS
from mis_ext.validation import check_instance, check_lengths

_LOG = logging.getLogger("mis_ext")
_UNSCORED = "take several steps, or --loss-type custom_loss with mis_ext.policy_loss"


def group_rewards(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Compute the rewards, raw and relative to the baseline of their prompts.

    For ``--custom-reward-post-process-path mis_ext.group_rewards``. ``group_index`` identifies a prompt, which may have
    any number of samples. The samples of a ``rollout_id`` are one trajectory, and count once. A sample that is not
    trained (``remove_sample``, or an empty ``loss_mask``) counts only with ``mis_group_over: all``, because its reward
    is often meaningless. It is not known yet what a correction rejects. So with ``mis_group_over: kept`` this function
    subtracts the mean of the prompt, and :func:`prepare_rollout` applies the baseline once, also ``leave_one_out``.

    Args:
        args: The framework's arguments, with the keys of mis_ext among them.
        samples: The framework's ``Sample`` objects of one rollout.

    Raises:
        ValueError: A flag contradicts a key, a sample lacks a ``group_index`` or reward, or a trajectory has several.
    """
    given = all_arguments(args)
    # The flag without a key has the default baseline.
    config = read_group(given | {"mis_group_baseline": given.get("mis_group_baseline") or "mean"})
    rewards = [sample.get_reward_value(args) for sample in samples]
    needed = {
        "group_index": (
            [sample.group_index for sample in samples],
            "the rollout function must keep the index of the data source",
        ),
        "reward": (
            rewards,
            "the reward function must give each sample a number, also one that is not trained; --reward-key selects "
            "it from a mapping",
        ),
    }
    for name, (values, remedy) in needed.items():
        unknown = [place for place, value in enumerate(values) if not isinstance(value, SupportsFloat)]
        if unknown:
            said = f"samples {unknown[:8]} have no {name}, got {reprlib.repr(values[unknown[0]])}"
            raise ValueError(f"mis_ext.group_rewards: {said}: {remedy}")
    # By index as in Miles, unless the index is the rollout_id of another sample of the prompt. Then each sample is its
    # own trajectory, as in slime.
    taken = {(sample.group_index, sample.rollout_id) for sample in samples if sample.rollout_id != sample.index}
    numbers = [
        (sample.rollout_id, None if (sample.group_index, sample.index) in taken else sample.index, -1 - place)
        for place, sample in enumerate(samples)
    ]
    trajectories = [next(number for number in each if number is not None) for each in numbers]
    trained = [
        not sample.remove_sample and sample.response_length > 0 and (sample.loss_mask is None or any(sample.loss_mask))
        for sample in samples
    ]
    advantages = group_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([sample.group_index for sample in samples]),
        trajectories=torch.tensor(trajectories),
        counted=None if config.over == "all" else torch.tensor(trained),
        # The factor n / (n - 1) needs the number of kept trajectories, which is known later.
        leave_one_out=config.baseline == "leave_one_out" and config.over != "kept",
        with_deviation=config.with_deviation,
    )
    return rewards, advantages.tolist()


def prepare_rollout(args: Any, rollout_id: int | None = None, rollout_data: dict[str, Any] | None = None) -> None:
    """Compute values of the whole rollout on all ranks: lags and baselines of prompts.

    For ``--rollout-data-postprocess-path mis_ext.prepare_rollout``. With ``mis_staleness`` each token gets its lag, see
    :func:`_token_lags`. ``mis_denominator: kept`` rejects samples that share a denominator.

    With ``mis_group_over: kept`` a trajectory without a kept token does not count in the baseline of its prompt. With
    ``mis_prompt_mean`` every prompt has the same weight. Both change ``advantages``, in which the policy gradient is
    linear. KL and entropy terms keep the framework's denominators. slime's data source numbers samples prompt by
    prompt, so ``sample_indices`` and ``n_samples_per_prompt`` identify a prompt.

    Args:
        args: The framework's arguments.
        rollout_id: Number of the rollout, for messages.
        rollout_data: This rank's samples: ``log_probs``, ``rollout_log_probs``, ``loss_masks``, ``total_lengths``,
            ``response_lengths``, and ``rollout_mask_sums`` if the framework has them. For baselines and prompts also
            ``advantages``, which are changed, ``rewards``, ``sample_indices``, ``rollout_ids``, and the schedule.

    Raises:
        ValueError: The framework gives no rollout data (Miles), has not scored the rollout before training, or lets
            samples share denominators with ``mis_denominator: kept``.
        RuntimeError: Another rank failed. The message names it; see its own error.
    """
    groups = find_groups()
    run = shared_run(args, groups, device=device_of())
    session, of_prompts = run.session, run.config.group
    session.rollout_seen = True
    config = session.config
    if config.staleness:
        try:
            session.token_lags = _token_lags(rollout_data)
        except Exception as error:
            # Log the traceback: the loss keeps only the text, because an error would keep the rollout's memory.
            _LOG.exception("mis_staleness: the versions of this rollout")
            session.token_lags = f"mis_staleness: the versions of this rollout: {type(error).__name__}: {error}"
    refuses_shared = config.denominator == "kept" and not config.per_token_loss and not config.metrics_only
    key = of_prompts.needs_rollout
    if key is None and not refuses_shared:
        return
    if rollout_data is None:
        if key is not None:
            raise ValueError(f"{key}: Miles passes no rollout data; remove the key")
        return
    megatron = initialized_megatron()
    if megatron is not None and not megatron.is_pipeline_last_stage():
        return
    alone = groups.without_data_parallelism
    lengths, device = rollout_data.get("response_lengths", ()), device_of_rollout(rollout_data)
    measuring = Session(config if config.metrics_only else config.replace(scope="micro_batch", metrics=()))
    streams: PackedStreams | None = None
    own: dict[str, Tensor] = {}
    # The context-parallel ranks learn of an error from the work and from the correction, the others here.
    with Due([Message((2,), torch.float64, groups.dp_group)], device).reporting_errors():
        with measuring.local_work(lengths, groups=alone, device=device, failed=run.failed):
            if refuses_shared:
                _refuse_shared_denominators(rollout_data, device)
            if key is not None:
                num_answers = read_argument(args, "n_samples_per_prompt")
                own = _samples_of(of_prompts, rollout_data, num_answers=num_answers, key=key, device=device)
                if not config.metrics_only:
                    streams = pack_rollout(rollout_data, groups, rollout_id, device=device, key=key, remedy=_UNSCORED)
                    sides = rollout_data["rollout_log_probs"], streams.layout.local_lengths
                    streams = streams._replace(lag_T=session.lags_of(*sides, device=device))
        if streams is None:
            status = measuring.neutral(lengths, groups=alone, device=device).status
        else:
            correction = measuring.compute(streams, groups=alone)
            status, own["kept"] = correction.status, _sums(unpack(correction.loss_mask_R, streams.layout), device)
        row = torch.stack([torch.full_like(status, len(own.get("reward", ()))), status])
    number_W, status_W = gather_rows(row, groups.dp_group).unbind(-1)
    raise_if_failed(status_W.tolist())
    if key is not None:
        # From here every rank has the same numbers, and raises the same errors.
        numbers = [*map(int, number_W.tolist())]
        _compare_prompts(run.config, rollout_data, own, numbers, groups=groups, device=device)


class TokenLags:
    """The lag of every token of a rollout, for lookup in a micro-batch.

    The frameworks pass a correction neither the indices of its samples nor their versions. But the behavior log-probs
    that they pass are the tensors of the rollout themselves.

    Args:
        samples: Behavior log-probs of this rank's tokens, per sample.
        lags: Per sample ``[length]``, NaN if unknown.
    """

    def __init__(self, samples: Sequence[Tensor], lags: Sequence[Tensor]) -> None:
        # Both are kept, so no other tensor can have their address.
        pairs = zip(samples, lags, strict=True)
        self._by_place = {sample.data_ptr(): (sample, lag) for sample, lag in pairs if sample.numel()}

    def of(self, samples: Sequence[Tensor]) -> list[Tensor]:
        """The lags of some of the samples, in their order."""
        found = []
        for sample in samples:
            # An empty tensor has no address.
            lag = sample if sample.numel() == 0 else self._by_place.get(sample.data_ptr(), (None, None))[1]
            if lag is None or lag.numel() != sample.numel():
                raise ValueError(
                    "mis_staleness: a sample of this micro-batch is not in the rollout that mis_ext.prepare_rollout "
                    "received, or the framework has copied its rollout_log_probs since then"
                )
            found.append(lag)
        return found


def _token_lags(rollout_data: dict[str, Any] | None) -> TokenLags | str:
    """Return the lags of this rank's tokens, or why there are none: the loss raises this and notifies the other ranks.

    ``mis_ext.rollout.generate`` stores the version of each token in a field that the frameworks pass to the trainer,
    the log-probs of a teacher. The version of the trainer is the number of times that it has sent its weights to the
    engine. No framework passes it to hooks, and Miles does not pass the rollout. So both are read from the trainer in
    the call stack.
    """
    frame = sys._getframe(1)
    trainer: Any = None
    while frame is not None and trainer is None:
        found = frame.f_locals.get("self")
        if hasattr(getattr(found, "weight_updater", None), "weight_version"):
            trainer, rollout_data = found, frame.f_locals.get("rollout_data", rollout_data)
        frame = frame.f_back  # type: ignore[assignment]
    if trainer is None or rollout_data is None:
        return "mis_staleness: this trainer has no weight_updater with a weight_version, from which lags are counted"
    # Remove it: it is not a log-prob, and the framework would report its mean.
    versions = rollout_data.pop(VERSIONS, None)
    if versions is not None and len(versions) == 0 and rollout_data.get("rollout_log_probs") == []:
        # This rank has no sample.
        return TokenLags([], [])
    if versions is None or is_absent(rollout_data.get("rollout_log_probs")):
        return (
            "mis_staleness: the rollout has no version for each token: give --custom-generate-function-path "
            "mis_ext.rollout.generate"
        )
    current = float(trainer.weight_updater.weight_version)
    return TokenLags(rollout_data["rollout_log_probs"], [current - version.float() for version in versions])


_SAMPLE = ("prompt", "trajectory", "reward", "step", "kept", "tokens", "divisor", "terms")
"""The values of a sample that ranks exchange."""


def _compare_prompts(
    config: RunConfig,
    rollout_data: dict[str, Any],
    own: Mapping[str, Tensor],
    numbers: Sequence[int],
    *,
    groups: Groups,
    device: torch.device,
) -> None:
    """Change this rank's advantages by the samples of all ranks; ``numbers``: samples per rank."""
    of_prompts = config.group
    rows = torch.zeros(max(numbers), len(_SAMPLE), dtype=torch.float64, device=device)
    rows[: len(own["reward"])] = torch.stack([own[name] for name in _SAMPLE], -1)
    rows_W = gather_rows(rows, groups.dp_group).cpu()
    every = torch.cat([each[:count] for each, count in zip(rows_W, numbers, strict=True)])
    sample = dict(zip(_SAMPLE, every.unbind(-1), strict=True))
    added_N, factor_N = torch.zeros_like(sample["reward"]), torch.ones_like(sample["reward"])
    if of_prompts.over == "kept":
        refuse_uncentered(sample["reward"], sample["prompt"], sample["trajectory"])
        anew_N = group_advantages(
            sample["reward"],
            sample["prompt"],
            trajectories=sample["trajectory"],
            counted=sample["kept"] > 0.0,
            leave_one_out=of_prompts.baseline == "leave_one_out",
            with_deviation=of_prompts.with_deviation,
        )
        added_N = anew_N - sample["reward"]
    if of_prompts.prompt_mean:
        factor_N = prompt_factors(
            group_N=sample["prompt"],
            step_N=sample["step"],
            kept_N=sample["kept"],
            tokens_N=sample["tokens"],
            divisor_N=sample["divisor"],
            terms_N=None if config.correction.per_token_loss else sample["terms"],
        )
    first = sum(numbers[: groups.dp_rank])
    here = slice(first, first + len(own["reward"]))
    rollout_data["advantages"] = [
        (advantage + added) * factor
        for advantage, added, factor in zip(
            rollout_data["advantages"], added_N[here].tolist(), factor_N[here].tolist(), strict=True
        )
    ]


def _samples_of(
    of_prompts: GroupConfig, rollout_data: dict[str, Any], *, num_answers: int | None, key: str, device: torch.device
) -> dict[str, Tensor]:
    """``[S]`` each, float64: this rank's samples. Without a correction, all trained tokens count as kept.

    A token counts by its mask value, as in the framework's denominators.
    """
    needed = ["advantages", "rewards", "sample_indices", "rollout_ids", "loss_masks"]
    if of_prompts.prompt_mean:
        needed += ["global_batch_sizes", "num_microbatches", "micro_batch_indices"]
    missing = [name for name in needed if rollout_data.get(name) is None]
    if missing or num_answers is None:
        raise ValueError(f"{key}: rollout_data has no {', '.join(missing) or 'n_samples_per_prompt'}; remove the key")
    if any(index is None for index in rollout_data["sample_indices"]):
        raise ValueError(f"{key}: samples have no index; slime's data source sets it, prompt by prompt")

    def column(name: str, values: Any) -> Tensor:
        try:
            return torch.as_tensor(values, dtype=torch.float64, device=device)
        except TypeError as error:
            raise TypeError(f"{key}: {name} must have a number for each sample ({error})") from None

    masks = rollout_data["loss_masks"]
    for name in ("loss_masks", "advantages"):
        check_samples(name, rollout_data[name])
    tokens_S = _sums(masks, device)
    shared = rollout_data.get("rollout_mask_sums")
    steps, terms = _schedule(rollout_data, len(masks)) if of_prompts.prompt_mean else ([0] * len(masks),) * 2
    # Check it here, where the other ranks still learn of an error.
    given = {name: len(rollout_data[name]) for name in ("advantages", "rewards", "sample_indices", "rollout_ids")}
    wrong = {name: number for name, number in given.items() if number != len(masks)}
    if wrong:
        raise ValueError(f"{key}: there are {len(masks)} loss_masks, but the other lists have {wrong}")
    divisor_S = tokens_S if shared is None else stack_mask_sums(shared, len(masks)).to(tokens_S)
    if shared is not None:
        MASK_SUMS.check(divisor_S)
    return {
        "prompt": column("sample_indices", rollout_data["sample_indices"]).div(num_answers, rounding_mode="floor"),
        "trajectory": column("rollout_ids", rollout_data["rollout_ids"]),
        "reward": column("rewards", rollout_data["rewards"]),
        "step": column("step", steps),
        "kept": tokens_S,
        "tokens": tokens_S,
        "divisor": divisor_S.clamp_min(1.0),
        "terms": column("terms", terms),
    }


def _schedule(rollout_data: Mapping[str, Any], num_samples: int) -> tuple[list[int], list[int]]:
    """The optimizer step of each sample, and the number of loss terms of that step."""
    numbers, sizes = (check_lengths(name, rollout_data[name]) for name in ("num_microbatches", "global_batch_sizes"))
    indices = check_instance("micro_batch_indices", rollout_data["micro_batch_indices"], (list, tuple))
    batches = [check_lengths(f"micro_batch_indices[{index}]", each) for index, each in enumerate(indices)]
    if len(sizes) != len(numbers) or len(batches) != sum(numbers):
        raise ValueError(
            f"num_microbatches has {len(numbers)} steps with {sum(numbers)} micro-batches, global_batch_sizes "
            f"{len(sizes)} steps, micro_batch_indices {len(batches)} micro-batches: they must agree"
        )
    steps, terms = [0] * num_samples, [0] * num_samples
    step_of = [step for step, number in enumerate(numbers) for _ in range(number)]
    for step, places in zip(step_of, batches, strict=True):
        for place in places:
            if place >= num_samples:
                raise ValueError(f"micro_batch_indices contains {place}, but there are {num_samples} loss_masks")
            steps[place], terms[place] = step, sizes[step]
    return steps, terms


def _sums(masks: list[Tensor], device: torch.device) -> Tensor:
    """``[S]``, float64: the sum of each mask."""
    sums = [mask.double().sum() for mask in masks]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64, device=device)


def _refuse_shared_denominators(rollout_data: dict[str, Any], device: torch.device) -> None:
    """Raise an error for samples whose sum the framework divides by more than their own number of tokens."""
    given = rollout_data.get("rollout_mask_sums")
    if given is None:
        return
    check_samples("loss_masks", rollout_data["loss_masks"])
    own_S = _sums(rollout_data["loss_masks"], device)
    shared_S = stack_mask_sums(given, len(own_S)).to(own_S)
    # A sample without trainable tokens adds nothing with any divisor.
    if not bool(((shared_S == own_S) | (own_S == 0.0)).all()):
        raise ValueError(
            "mis_denominator: kept: several samples of this rollout share a denominator; use mis_denominator: fixed"
        )
