# SPDX-License-Identifier: Apache-2.0
"""Scores and full policy loss of batches as in slime, Miles and Megatron loops: lists of tensors per sample.

:func:`make_loss_func` is for a plain Megatron-Core loop, whose ranks share sequences, batch and vocabulary.
:func:`hand_over_hidden_states` makes a Megatron-Core model return a tensor without columns instead of logits. The
schedule, the wrappers of the model and the framework pass it on like any logits. It carries a :class:`Head`, which
:func:`fused_scores` reads in the loss and in the pass that scores the rollout.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.correct import Correction
from mis_ext.correction.layout import PackedLayout, owned_chunks, runs, to_device
from mis_ext.hosts.groups import Groups, device_of, find_groups, initialized_megatron
from mis_ext.hosts.packing import (
    MASK,
    MASK_SUMS,
    batch_layout,
    is_absent,
    pack,
    stack_mask_sums,
    unpack,
)
from mis_ext.hosts.session import Run, read_argument, shared_run
from mis_ext.hosts.whole_loss import loss_work, packed_loss, present, tokens_for
from mis_ext.keys.loss_keys import WholeLoss
from mis_ext.keys.reading import RunConfig
from mis_ext.loss.objective import LossTokens
from mis_ext.loss.policy import PolicyLoss, Reducer, num_tokens
from mis_ext.scoring import EntropyUse, KeptColumns, Scores, score_hidden, score_tokens
from mis_ext.validation import MismatchWarning, check_entries, check_number, check_tensors

Batch = Mapping[str, Any]
LossFunc = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
MISSING = {
    "behavior": "rollout_log_probs are missing (the rollout function must store the inference engine's log-probs)",
    "reference": "ref_log_probs are missing (--use-kl-loss with --ref-load makes the framework score them; use "
    "--kl-loss-coef 0 for a method with its own penalty)",
    "state_values": "state_values are missing in the batch (no flag of slime or Miles gives them; a batch of "
    "make_loss_func may have them)",
}
"""The sources of the inputs of a loss, for errors."""
_NEEDED = ("response_lengths", "total_lengths", "loss_masks", "advantages")


class Unscored(NamedTuple):
    """A micro-batch before its tokens are scored.

    Attributes:
        config: The configuration of the run.
        batch: ``unconcat_tokens``, ``total_lengths``, and ``max_seq_lens`` if samples are padded to other lengths.
        logits: ``[1, T, V]`` packed or ``[B, L, V]`` padded, this rank's parts of sequences and vocabulary; or the
            :class:`NoLogits` of :func:`hand_over_hidden_states`.
        layout: The local response tokens.
        groups: The ranks that share sequences.
    """

    config: RunConfig
    batch: Batch
    logits: Tensor
    layout: PackedLayout
    groups: Groups


class Host(NamedTuple):
    """``score`` scores the tokens; ``metrics``: names of metrics that slime does not have."""

    groups: Groups
    score: Callable[[Unscored], Scores]
    metrics: frozenset[str] = frozenset()


def make_loss_func(args: Any, batch: Mapping[str, Any], *, groups: Groups | None = None) -> LossFunc:
    """Return the ``loss_func(output_tensor)`` of a micro-batch, which a ``forward_step`` returns with the logits.

    Megatron-Core divides the loss by the number that ``loss_func`` returns, and averages over data- and
    context-parallel ranks. With ``calculate_per_token_loss`` it sums the loss, and divides by the sum of these numbers.
    The loss is scaled for this, so the gradient is that of the mean over samples of per-sample means, or of the mean
    over tokens. Log-probs and entropy are computed here, with Megatron-Core's tensor-parallel group if it is
    initialized.

    Args:
        args: A mapping or a namespace with the keys of docs/reference/policy_loss_keys.md. A namespace must be the same
            object for every micro-batch of a run. ``calculate_per_token_loss`` must have the same value as in
            Megatron-Core's configuration.
        batch: The batch of :func:`~mis_ext.policy_loss`: lists per sample of ``unconcat_tokens``, ``loss_masks``,
            ``advantages`` and log-probs, with ``total_lengths`` and ``response_lengths``.
        groups: The ranks; by default Megatron-Core's.

    Returns:
        A function of the logits, ``[1, T, V / TP]`` packed, or ``[B, L, V / TP]`` with ``qkv_format: bshd``. It returns
        the loss, the number of samples or of this rank's response tokens (0-dim, int32), and ``[total, count]`` of
        every metric. These are exact under any sum over micro-batches, data- and context-parallel ranks. Metrics of the
        correction count only the samples in which they were measured.
    """
    host = Host(find_groups() if groups is None else groups, plain_scores)
    run, cp_size = shared_run(args, host.groups, device=device_of(), whole_loss=True), host.groups.cp_size
    per_token = run.config.correction.per_token_loss

    def loss_func(output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        found = batch_loss(run, host, batch, output_tensor)
        number = found.response_T.sum()
        if per_token:
            loss, count = found.loss, number
        else:
            number = torch.full_like(number, len(batch["response_lengths"]))
            # Every context-parallel rank counts all samples, and Megatron-Core averages over these ranks.
            loss, count = found.loss * cp_size, number / cp_size
        values = torch.stack([*found.metrics.values()])
        pairs = torch.stack([values, count.to(values.dtype).expand_as(values)], dim=1)
        # No framework divides these metrics, so samples that were not measured are not counted.
        return loss, number.int(), dict(zip(found.metrics, pairs.unbind(), strict=True)) | found.measured()

    return loss_func


def batch_loss(run: Run, host: Host, batch: Batch, logits: Tensor) -> PolicyLoss:
    """The loss and its metrics, on the device of the logits."""
    config, loss, groups = run.config, run.config.loss, host.groups
    settings = loss.settings
    lengths, device = read_argument(batch, "response_lengths"), device_of(logits)
    lengths_or_masks = read_argument(batch, "loss_masks") if lengths is None else lengths
    with loss_work(run, lengths_or_masks, groups=groups, device=device, extra_metrics=host.metrics):
        _check_batch(loss, batch, logits)
        run.check_rollout()
        layout = batch_layout(
            is_padded=config.is_padded,
            groups=groups,
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            max_seq_lens=batch.get("max_seq_lens"),
            device=logits.device,
        )
        make_reducer = _reducer_maker(loss, batch, layout)
        scores = host.score(Unscored(config, batch, logits, layout, groups))
        device = scores.log_prob_T.device

        def packed(key: str) -> Tensor:
            return pack(key, batch[key], layout.local_lengths, device=device)

        def optional(key: str) -> Tensor | None:
            if layout.num_sequences == 0:
                return scores.log_prob_T.detach()
            return None if is_absent(batch.get(key)) else packed(key)

        mask_R = pack("loss_masks", batch["loss_masks"], layout.response_lengths, device=device)
        if batch.get("rollout_mask_sums") is None:
            divisor_S = num_tokens(mask_R, layout)
        else:
            divisor_S = stack_mask_sums(batch["rollout_mask_sums"], layout.num_sequences)
            run.session.check_range(divisor_S, MASK_SUMS)
        given = LossTokens(
            log_probs=present(
                {
                    "current": scores.log_prob_T,
                    "behavior": optional("rollout_log_probs"),
                    "proximal": None if loss.skips_scoring else optional("log_probs"),
                    "reference": optional("ref_log_probs"),
                }
            ),
            advantages_T=packed("advantages"),
            response_mask_R=mask_R,
            # As in the reducers of the frameworks.
            divisor_S=divisor_S.clamp_min(1.0),
            layout=layout,
            entropy_T=scores.entropy_T,
            reverse_kl_T=None if is_absent(batch.get("opd_reverse_kl")) else packed("opd_reverse_kl"),
            state_values_T=optional("state_values"),
            lag_T=run.session.lags_of(batch.get("rollout_log_probs"), layout.local_lengths, device=device)
            if loss.has_correction
            else None,
        )
        run.session.check_range(mask_R, MASK)
        tokens = tokens_for(settings, given, groups, missing=MISSING)
        if loss.has_correction and "behavior" not in tokens.log_probs:
            run.session.report_missing("rollout_log_probs")
    found = packed_loss(run, tokens, groups=groups, make_reducer=make_reducer, extra_metrics=host.metrics)
    if layout.num_local_tokens > 0 or scores.log_prob_T.requires_grad:
        return found
    # The backward pass of context parallelism has collectives that a rank without tokens must join, but log-probs of
    # zero tokens may not depend on the logits.
    return found._replace(loss=found.loss + logits.reshape(-1)[:0].sum())


def _check_batch(loss: WholeLoss, batch: Batch, logits: Tensor) -> None:
    """Raise an error if the batch lacks an input, and warn of a scoring pass that the loss does not read."""
    check_entries("batch", batch, _NEEDED)
    settings = loss.settings
    if not (settings.reads_stored or loss.is_told_to_skip or is_absent(batch.get("log_probs"))):
        reason = "mis_loss_proximal: current" if settings.uses_proximal else settings.chosen_by
        warnings.warn(
            f"{reason} does not use the trainer's own pass over the rollout: set --use-rollout-logprobs to skip "
            "this pass",
            MismatchWarning,
            stacklevel=5,
        )
    check_tensors({"logits": logits})
    if logits.ndim != 3:
        raise ValueError(f"logits must be [1, T, V] or [B, L, V], got shape {list(logits.shape)}")


def _reducer_maker(
    loss: WholeLoss, batch: Batch, layout: PackedLayout
) -> Callable[[Correction | None], Reducer] | None:
    """The reducer function of the user, if there is one. It gets the returned masks, as in the frameworks."""
    if loss.reducer_path is None:
        return None
    module, _, name = loss.reducer_path.rpartition(".")
    make: Callable[..., Reducer] = getattr(import_module(module), name)

    def make_reducer(correction: Correction | None) -> Reducer:
        masks = batch["loss_masks"] if correction is None else unpack(correction.loss_mask_R, layout)
        return make(batch["total_lengths"], batch["response_lengths"], masks, loss.settings.per_token_loss)

    return make_reducer


def positive_temperature(config: RunConfig) -> float:
    """The divisor of the logits in frameworks without greedy sampling."""
    temperature = config.loss.temperature
    return check_number("rollout_temperature", temperature, low=0.0, high=float("inf"), open_low=True)


def entropy_use(loss: WholeLoss, *, is_observed: bool) -> EntropyUse:
    """Use of the entropy in the loss: a term, a logged value, or none."""
    if loss.settings.entropy_coef != 0.0:
        return "gradient"
    return "value" if is_observed else "none"


class VocabularyPart(NamedTuple):
    """The tensor-parallel ranks, each with a part of the vocabulary, and this rank among them; None for one rank."""

    group: Group | None = None
    rank: int = 0


def megatron_vocabulary() -> VocabularyPart:
    """This rank's part of the vocabulary if Megatron-Core is initialized, else all of it."""
    megatron = initialized_megatron()
    if megatron is None or megatron.get_tensor_model_parallel_world_size() == 1:
        return VocabularyPart()
    return VocabularyPart(megatron.get_tensor_model_parallel_group(), megatron.get_tensor_model_parallel_rank())


def plain_scores(unscored: Unscored) -> Scores:
    """Log-probs and entropy from logits as the frameworks compute them, for a batch outside of a framework."""
    refuse_host_scoring(unscored.config)
    return fused_scores(unscored, part=megatron_vocabulary(), temperature=positive_temperature(unscored.config))


def refuse_host_scoring(config: RunConfig) -> None:
    """Raise an error for a key that requires the function of a framework."""
    if config.loss.asked_scoring == "host":
        raise ValueError("mis_loss_scoring: host requires slime or Miles: remove the key")


def fused_scores(
    unscored: Unscored,
    *,
    part: VocabularyPart,
    temperature: float,
    observes_entropy: bool = True,
    kept: KeptColumns | None = None,
) -> Scores:
    """Log-probs and entropy of the response tokens, in one pass over the logits, or from hidden states.

    Args:
        unscored: The micro-batch.
        part: This rank's part of the vocabulary.
        temperature: The rollout temperature, which divides the logits.
        observes_entropy: Whether the entropy is logged if the loss does not use it.
        kept: The tokens from which each token was sampled; None for all.

    Raises:
        ValueError: The batch does not fit the logits. Tensor-parallel ranks are notified only of errors in the scoring.
            After an earlier error they wait, because the size of the message is not known yet.
    """
    config, batch, logits, layout, groups = unscored
    check_entries("batch", batch, ("unconcat_tokens",))
    loss = config.loss
    padded_lengths = None
    if config.is_padded:
        padded_lengths = batch.get("max_seq_lens") or [logits.shape[1] * groups.cp_size] * len(logits)
    places = response_places(layout, groups, total_lengths=batch["total_lengths"], padded_lengths=padded_lengths)
    num_rows = logits.shape[:-1].numel()
    if places.num_rows > num_rows:
        raise ValueError(
            f"logits have shape {list(logits.shape)} with {num_rows} rows, but total_lengths (max_seq_lens if samples "
            f"are padded) need at least {places.num_rows}"
        )
    all_tokens = pack("unconcat_tokens", batch["unconcat_tokens"], batch["total_lengths"], device=logits.device)
    # Without samples the tensor is not of integers.
    token_T, row_T = all_tokens.long().index_select(0, places.token_T), places.row_T
    given: dict[str, Any] = {
        "temperature": temperature,
        "entropy": entropy_use(loss, is_observed=observes_entropy),
        "kept": kept,
        "tp_group": part.group,
        "tp_rank": part.rank,
    }
    if not isinstance(logits, NoLogits):
        if logits.shape[-1] == 0:
            raise ValueError(
                f"logits have shape {list(logits.shape)}: the output layer passes hidden states, but a function "
                "between it and the loss has dropped them"
            )
        return score_tokens(logits, token_T, row_T=row_T, inplace=loss.inplace, **given)
    head = logits.head
    if len(logits) > 1:
        # Hidden states are [L, B, H].
        row_T = row_T % logits.shape[1] * len(logits) + row_T // logits.shape[1]
    return score_hidden(
        head.hidden_SBH,
        head.weight,
        token_T,
        row_T=row_T,
        bias=head.bias,
        sequence_parallel=head.sequence_parallel,
        gradient_accumulation_fusion=head.gradient_accumulation_fusion,
        **given,
    )


_PASSES_ON = frozenset({"transpose", "contiguous", "float", "to"})
"""Names of PyTorch functions that are allowed between the output layer of a model and its loss.

Not ``detach``: the head would still refer to the graph.
"""
_CHANGES_NOTHING = frozenset({"requires_grad_", "__get__"})
"""Other functions that return the same tensor and are not in place."""


class Head(NamedTuple):
    """Head of one micro-batch: the input of the output layer, ``[S / TP, B, H]`` or ``[S, B, H]``.

    ``weight``: ``[V / TP, H]``. ``sequence_parallel``: each rank has its part of the first dimension.
    ``gradient_accumulation_fusion``: the weight's gradient is added to its ``main_grad``.
    """

    hidden_SBH: Tensor
    weight: Tensor
    bias: Tensor | None
    sequence_parallel: bool
    gradient_accumulation_fusion: bool


class NoLogits(Tensor):
    """Logits without columns, and their head. Most operations return an ordinary tensor, which the loss rejects."""

    head: Head

    @classmethod
    def with_head(cls, logits: Tensor, head: Head) -> NoLogits:
        """Create a tensor without columns that has this head."""
        found = logits.as_subclass(cls)
        found.head = head
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Keep the head if the function returns the tensor itself.

        Raises:
            RuntimeError: The operation is in place, which the head would not see.
        """
        name, kwargs = getattr(func, "__name__", None), kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
        if name in _PASSES_ON:
            # If it has nothing to do, it returns the same tensor.
            given = args[0] if args else kwargs["input"]
            return found if type(found) is cls else cls.with_head(found, given.head)
        if name == "__setitem__" or (type(found) is cls and name not in _CHANGES_NOTHING):
            raise RuntimeError(
                f"{name} in place has no effect on a loss without logits: the output layer passes hidden states"
            )
        return found


def _is_plain(forward: Any, plain: Any) -> bool:
    """True if it computes logits like the plain output layer of newer Megatron-Core in slime and Miles."""
    name = f"{forward.__module__}.{forward.__qualname__}"
    return forward is plain or name == "megatron.core.transformer.linear_cross_entropy.LinearCrossEntropyModule.forward"


def hand_over_hidden_states(model: Any) -> None:
    """Make the last stage of a Megatron-Core model pass hidden states to the loss instead of logits.

    The output layer keeps its weight and its name in checkpoints. It still makes logits if a call has another argument
    (``runtime_gather_output`` in inference), and if the model itself computes a loss, such as multi-token prediction. A
    layer that replaces it, such as that of a critic, is not changed.

    Args:
        model: On the last pipeline stage, without wrappers.

    Raises:
        ValueError: Its logits are not those of a plain output layer.
    """
    # A process with such a model has this package.
    plain = import_module("megatron.core.tensor_parallel").ColumnParallelLinear
    layer, why = model.output_layer, None
    if not isinstance(layer, plain):
        why = f"the output layer is a {type(layer).__name__}"
    elif not _is_plain(type(layer).forward, plain.forward):
        why = f"the output layer is a {type(layer).__name__} with its own forward, such as one with a soft cap"
    elif layer.skip_bias_add and layer.bias is not None:
        why = "the output layer leaves its bias to its caller (skip_bias_add=True)"
    elif layer.gather_output:
        why = "the output layer gathers the vocabulary (parallel_output=False)"
    elif model.config.defer_embedding_wgrad_compute:
        why = "--defer-embedding-wgrad-compute keeps the input of the output layer for later"
    elif getattr(model.config, "use_mup", False):
        why = "--use-mup scales the logits behind the output layer"
    if why is not None:
        raise ValueError(f"hidden states cannot replace logits: {why}")
    make_logits, compute_loss = layer.forward, model.compute_language_model_loss

    def forward(input_: Tensor, weight: Tensor | None = None, *others: Any, **more: Any) -> Any:
        if any(value is not None for value in (*others, *more.values())):
            return make_logits(input_, weight, *others, **more)
        ranks = layer.tp_group.size() if layer.sequence_parallel else 1
        head = Head(
            input_,
            layer.weight if weight is None else weight,
            layer.bias,
            layer.sequence_parallel,
            layer.gradient_accumulation_fusion,
        )
        # This tensor is part of the graph, for a rank without tokens in its loss.
        return NoLogits.with_head(input_[..., :0].repeat(ranks, 1, 1), head), None

    def compute_language_model_loss(labels: Tensor, logits: Tensor) -> Any:
        if isinstance(logits, NoLogits):
            logits, _ = make_logits(logits.head.hidden_SBH, logits.head.weight)
        return compute_loss(labels, logits)

    layer.forward, model.compute_language_model_loss = forward, compute_language_model_loss


class Places(NamedTuple):
    """``[T]`` each: the local row of logits that scores a response token, and the index among all tokens.

    ``num_rows``: the required number of rows.
    """

    row_T: Tensor
    token_T: Tensor
    num_rows: int


def response_places(
    layout: PackedLayout, groups: Groups, *, total_lengths: Sequence[int], padded_lengths: Sequence[int] | None
) -> Places:
    """Positions of the local response tokens of a zigzag or whole layout.

    Args:
        layout: The local tokens.
        groups: The ranks that share sequences.
        total_lengths: Tokens per prompt and response; without padding, the rows of a sample.
        padded_lengths: Rows per sample of ``[B, L, V]`` logits; None for packed logits.
    """
    chunks = owned_chunks(cp_rank=groups.cp_rank, cp_size=groups.cp_size)
    rows: list[int] = []
    tokens: list[int] = []
    row = token = whole = 0
    pieces = iter(zip(layout.pieces.lengths, layout.pieces.whole_starts, strict=True))
    for index, (response, total) in enumerate(zip(layout.response_lengths, total_lengths, strict=True)):
        if total <= response > 0:
            raise ValueError(
                f"response_lengths[{index}] is {response} and total_lengths[{index}] is {total}: a prompt token must "
                "precede each response"
            )
        length = total if padded_lengths is None else padded_lengths[index]
        chunk = chunks.padded(length) // chunks.num_chunks
        for place, number in enumerate(chunks.owned):
            _, whole_start = next(pieces)
            position = total - response + whole_start - whole
            # The row of the previous token, counted from the start of this chunk in the local rows.
            rows.append(row + place * chunk + position - 1 - number * chunk)
            tokens.append(token + position)
        row, token, whole = row + len(chunks.owned) * chunk, token + total, whole + response
    # Only the pieces are copied to the device: for all tokens the CPU would take longer than the loss on the device.
    pieces_3P = to_device([rows, tokens, layout.pieces.lengths], layout.device)
    ends = [first + length for first, length in zip(rows, layout.pieces.lengths, strict=True) if length]
    row_T, token_T = runs(pieces_3P[:2], pieces_3P[2], total=layout.num_local_tokens).unbind()
    return Places(row_T, token_T, num_rows=max(ends, default=0))
