# SPDX-License-Identifier: Apache-2.0
"""The full policy loss in slime, vime, and Miles: the running framework, its scoring of logits, and returned values.

Also the model without logits of :func:`model_provider`, and the pass that scores the rollout with it.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout, to_device
from mis_ext.frameworks import MILES, SLIME, find_framework
from mis_ext.hosts.groups import Groups, device_of, find_groups
from mis_ext.hosts.megatron import (
    Batch,
    Host,
    NoLogits,
    Unscored,
    VocabularyPart,
    batch_loss,
    entropy_use,
    fused_scores,
    hand_over_hidden_states,
    megatron_vocabulary,
    plain_scores,
    positive_temperature,
)
from mis_ext.hosts.packing import batch_layout, pack
from mis_ext.hosts.session import current_run, read_argument, shared_run
from mis_ext.keys.reading import RunConfig
from mis_ext.loss.policy import MILES_METRICS
from mis_ext.scoring import KeptColumns, Scores

MILES_PARALLEL = "miles.backends.training_utils.parallel"
MODEL_FLAG = "--custom-model-provider-path"
_SCORES = "get_log_probs_and_entropy"
IDS, OFFSETS = "rollout_top_p_token_ids", "rollout_top_p_token_offsets"


def policy_loss(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the full policy loss of a micro-batch and its metrics.

    For ``--loss-type custom_loss --custom-loss-function-path mis_ext.policy_loss``. The frameworks' own flags, the keys
    of the correction and the keys ``mis_loss_*`` select the loss, see docs/reference/policy_loss.md.

    Args:
        args: The framework's arguments, with the keys of mis_ext among them.
        batch: The framework's micro-batch: lists per sample; with context parallelism, this rank's parts.
        logits: ``[1, T, V / TP]`` packed, or padded ``[B, L, V / TP]``. With ``mis_loss_inplace`` the backward pass
            writes their gradient over them.
        sum_of_sample_mean: The framework's reducer. It is not called: all its sums are computed together, with the same
            denominators.

    Returns:
        The loss, with gradient: this rank's sum over samples of per-sample means (or the sum over tokens), which the
        framework scales. And metrics on the same scale under the framework's names, 0-dim, copied to the CPU
        together.

    Raises:
        ValueError: A flag, a key, a length or the data of the first calls is wrong; the message says what to change.
        TypeError: A key or a sample has the wrong type.
        RuntimeError: Another rank failed. The message names it; see its own error.
    """
    groups, part = find_ranks()
    run = shared_run(args, groups, device=device_of(logits), whole_loss=True)
    found = batch_loss(run, find_host(args, run.config, groups, part), batch, logits)
    return found.loss, on_host(found.metrics)


def on_host(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values as elements of one tensor on the CPU."""
    values = torch.stack([*metrics.values()]).cpu()
    return dict(zip(metrics, values.unbind(), strict=True))


def is_miles() -> bool:
    """Return True if Miles trains in this process."""
    return find_framework() is MILES


def find_ranks() -> tuple[Groups, VocabularyPart]:
    """The ranks of this process: those that share sequences and the batch, and those of the vocabulary."""
    if not is_miles():
        return find_groups(), megatron_vocabulary()
    state = sys.modules[MILES_PARALLEL].get_parallel_state()
    return find_groups(state), VocabularyPart(state.tp.group, state.tp.rank) if state.tp.size > 1 else VocabularyPart()


def find_host(args: Any, config: RunConfig, groups: Groups, part: VocabularyPart) -> Host:
    """Return the scoring function and extra metrics of the framework; without one, score with Megatron-Core or alone.

    Only the frameworks' own functions for log-probs get their ``args``.
    """
    if find_framework() is None:
        return Host(groups, plain_scores)
    is_fused = config.loss.scoring == "fused"
    score = partial(_captured_scores, part) if is_fused else partial(_scores_of_host, args)
    return Host(groups, score, MILES_METRICS if is_miles() else frozenset())


def _fused_scores(part: VocabularyPart, unscored: Unscored, *, with_entropy: bool | None = None) -> Scores:
    """Compute the values of the framework's own function for a part of the vocabulary."""
    loss, observes, kept = unscored.config.loss, True, None
    if is_miles():
        # For greedy sampling Miles does not divide the logits.
        temperature, observes = loss.temperature or 1.0, loss.observes_entropy
    else:
        # A scoring pass may keep all columns.
        replays = loss.replays_top_p and (with_entropy is None or unscored.batch.get(IDS) is not None)
        kept = kept_columns(unscored.batch, unscored.layout) if replays else None
        temperature = positive_temperature(unscored.config)
    observes = observes if with_entropy is None else with_entropy
    return fused_scores(unscored, part=part, temperature=temperature, observes_entropy=observes, kept=kept)


def scores_without_logits(
    logits: NoLogits,
    *,
    args: Any,
    unconcat_tokens: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    with_entropy: bool = False,
    entropy_requires_grad: bool = True,
    non_loss_data: bool = True,
    max_seq_lens: Sequence[int] | None = None,
    top_p_token_ids: Sequence[Any] | None = None,
    top_p_token_offsets: Sequence[Any] | None = None,
) -> Any:
    """Compute the values of the framework's own log-prob function from hidden states: lists of samples.

    It has the parameters of both frameworks' functions: ``entropy_requires_grad`` and ``max_seq_lens`` of Miles, the
    last two of slime. An unknown parameter is a ``TypeError``, because it may select columns. No value has a gradient,
    because Megatron-Core's schedule sets ``non_loss_data`` for a scoring pass.
    """
    if not non_loss_data:
        raise ValueError("non_loss_data must be True: mis_ext.model_provider scores a rollout here, got False")
    config = current_run(args, whole_loss=True).config
    groups, part = find_ranks()
    layout = batch_layout(
        is_padded=config.is_padded,
        groups=groups,
        total_lengths=total_lengths,
        response_lengths=response_lengths,
        max_seq_lens=max_seq_lens,
        device=logits.device,
    )
    batch = {
        "unconcat_tokens": unconcat_tokens,
        "total_lengths": total_lengths,
        "max_seq_lens": max_seq_lens,
        IDS: top_p_token_ids,
        OFFSETS: top_p_token_offsets,
    }
    scores = _fused_scores(part, Unscored(config, batch, logits, layout, groups), with_entropy=with_entropy)
    found: dict[str, Any] = {"log_probs": scores.log_prob_T} | ({"entropy": scores.entropy_T} if with_entropy else {})
    lists = {name: [*torch.split(values_T, [*layout.local_lengths])] for name, values_T in found.items()}
    return lists if is_miles() else (torch.empty((0,), device=logits.device), lists)


def _captured_scores(part: VocabularyPart, unscored: Unscored) -> Scores:
    scores = _fused_scores(part, unscored)
    module = _loss_module()
    # None while the framework captures nothing. Then no tensor per sample is made.
    if getattr(module, "_LOG_PROB_CAPTURE", True) is not None:
        lengths = [*unscored.layout.local_lengths]
        _capture(module, unscored.batch, torch.split(scores.log_prob_T.detach(), lengths))
    return scores


def _loss_module() -> Any:
    framework = find_framework()
    assert framework is not None
    return sys.modules[framework.loss]


def _capture(module: Any, batch: Batch, log_probs: Sequence[Tensor]) -> None:
    """Keep log-probs for the debug dump of slime and vime if they skipped the scoring pass."""
    capture = getattr(module, "_maybe_capture_log_probs", None)
    if capture is not None:
        capture(batch, log_probs)


def _scores_of_host(args: Any, unscored: Unscored) -> Scores:
    config, batch, logits, layout, _ = unscored
    if isinstance(logits, NoLogits):
        raise ValueError("the model of mis_ext.model_provider has no logits for the framework's own log-prob function")
    names = ("unconcat_tokens", "total_lengths", "response_lengths")
    given = {"args": args} | {name: batch[name] for name in names}
    if is_miles():
        entropy = entropy_use(config.loss, is_observed=config.loss.observes_entropy)
        found = _loss_module().get_log_probs_and_entropy(
            logits,
            **given,
            with_entropy=entropy != "none",
            entropy_requires_grad=entropy == "gradient",
            max_seq_lens=batch.get("max_seq_lens"),
        )
    else:
        module = _loss_module()
        # Versions of vime without this function have padded batches.
        kept_of = getattr(module, "get_rollout_top_p_logprob_kwargs", None)
        kept = {"max_seq_lens": batch.get("max_seq_lens")} if kept_of is None else kept_of(args, batch)
        _, found = module.get_log_probs_and_entropy(logits, **given, with_entropy=True, **kept)
        _capture(module, batch, found["log_probs"])

    def packed(name: str) -> Tensor:
        return pack(name, found[name], layout.local_lengths, device=logits.device)

    return Scores(packed("log_probs"), packed("entropy") if found.get("entropy") is not None else None)


def kept_columns(batch: Mapping[str, Any], layout: PackedLayout) -> KeptColumns:
    """The top-p nucleus of each local response token, from the nuclei of whole responses.

    Response token ``r`` of sample ``i`` has ``ids[i][offsets[i][r] : offsets[i][r + 1]]``. Tokens beyond the offsets
    were not recorded. The index tensors are built on the CPU, where slime keeps these lists.

    Args:
        batch: ``rollout_top_p_token_ids`` and ``rollout_top_p_token_offsets``, per sample a list, a tensor, or an
            object of vime that loads one.
        layout: The local response tokens.
    """
    samples = zip(*(_samples_under(key, batch, layout) for key in (IDS, OFFSETS)), layout.response_lengths, strict=True)
    pieces = iter(zip(layout.pieces.lengths, layout.pieces.whole_starts, strict=True))
    nothing = torch.zeros(0, dtype=torch.int64)
    ids, counts, recorded, whole = [nothing], [nothing], [nothing], 0
    for ids_N, offsets_R, response in samples:
        for length, whole_start in islice(pieces, layout.pieces.per_sequence):
            of_piece = offsets_R[whole_start - whole : whole_start - whole + length + 1]
            # A token that was not recorded has no ids, and its flag is False.
            num_recorded = max(len(of_piece) - 1, 0)
            ids += [ids_N[of_piece[0] : of_piece[-1]]] if num_recorded else []
            counts += [of_piece.diff(), nothing.new_zeros(length - num_recorded)]
            recorded.append((torch.arange(length) < num_recorded).long())
        whole += response
    parts = [*map(torch.cat, (ids, counts, recorded))]
    id_N, count_T, recorded_T = torch.split(to_device(torch.cat(parts), layout.device), [*map(len, parts)])
    token_T = torch.arange(layout.num_local_tokens, device=layout.device)
    return KeptColumns(
        id_N=id_N,
        token_N=token_T.repeat_interleave(count_T, output_size=len(id_N)),
        is_recorded_T=recorded_T.bool(),
    )


def _samples_under(key: str, batch: Mapping[str, Any], layout: PackedLayout) -> list[Tensor]:
    samples = batch.get(key)
    if samples is None:
        raise ValueError(
            f"{key} are missing: with a --rollout-top-p that is not 1 the rollout function must store them"
        )
    if len(samples) != layout.num_sequences:
        raise ValueError(f"{key} has {len(samples)} samples, but the batch has {layout.num_sequences}")
    # vime may keep a sample in a file.
    loaded = [sample.load() if hasattr(sample, "load") else sample for sample in samples]
    return [torch.as_tensor(sample, dtype=torch.int64, device="cpu") for sample in loaded]


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """Build the framework's own model with an output layer that returns hidden states instead of logits.

    For ``--custom-model-provider-path mis_ext.model_provider`` together with ``mis_ext.policy_loss``. The framework's
    passes that score the rollout with the trained, the reference or a teacher model use hidden states too. No flag of
    the frameworks selects this function, so its name in their training actor is set to a function of mis_ext. A
    critic's layer replaces the changed layer, and its values do not change.

    Args:
        pre_process: Whether this pipeline stage has the embedding.
        post_process: Whether it has the output layer.
        vp_stage: The index of the stage on this rank.

    Raises:
        ValueError: A flag or key of the run needs logits.
    """
    # The frameworks' Megatron-LM has this module; Megatron-Core alone does not.
    args = import_module("megatron.training.global_vars").get_args()
    refuse_missing_logits(args, current_run(args, whole_loss=True).config)
    backend = f"{(find_framework() or SLIME).name}.backends.megatron_utils"
    of_host = copy.copy(args)
    of_host.custom_model_provider_path = None
    provider = import_module(f"{backend}.model_provider").get_model_provider_func(of_host)
    model = provider(pre_process=pre_process, post_process=post_process, vp_stage=vp_stage)
    if post_process:
        hand_over_hidden_states(model)
        _replace_scoring(import_module(f"{backend}.actor"))
    return model


def refuse_missing_logits(args: Any, config: RunConfig) -> None:
    """Raise an error for flags and keys that need logits, which the model no longer returns."""
    loss, why = config.whole_loss, None
    if loss is None or read_argument(args, "loss_type") != "custom_loss":
        why = (
            "only mis_ext.policy_loss takes hidden states: set --loss-type custom_loss --custom-loss-function-path "
            "mis_ext.policy_loss"
        )
    elif loss.scoring == "host":
        why = "the framework's own function scores here (mis_loss_scoring: host, --true-on-policy-mode, --allgather-cp)"
    elif loss.inplace:
        why = "mis_loss_inplace: no effect without logits; remove it"
    elif is_miles() and read_argument(args, "recompute_loss_function"):
        # Its checkpoint is reentrant: an inner backward pass would go through the model, and the outer pass again.
        why = "--recompute-loss-function of Miles detaches the logits; it frees nothing without logits: remove it"
    if why is not None:
        raise ValueError(f"{MODEL_FLAG} mis_ext.model_provider: {why}")


def _replace_scoring(actor: Any) -> None:
    """Replace the function for log-probs that the framework's training actor calls."""
    of_host = getattr(actor, _SCORES, None)
    if of_host is None:
        raise ValueError(
            f"{MODEL_FLAG} mis_ext.model_provider: {actor.__name__} no longer has {_SCORES}; remove the flag"
        )
    if getattr(of_host, "__module__", None) != __name__:
        setattr(actor, _SCORES, _scoring(of_host))


def _scoring(of_host: Callable[..., Any]) -> Callable[..., Any]:
    """The framework's function for log-probs; calls without logits go to the function of mis_ext."""

    @functools.wraps(of_host, assigned=())
    def get_log_probs_and_entropy(logits: Tensor, **given: Any) -> Any:
        return scores_without_logits(logits, **given) if isinstance(logits, NoLogits) else of_host(logits, **given)

    return get_log_probs_and_entropy
