"""Training samples from calls that go on from each other: every call in one sample, as a path of their tree."""

from __future__ import annotations

from collections.abc import Sequence

from mis_ext.rollout.conversations.known_call import KnownCall
from mis_ext.rollout.training_sample import TrainingSample


def collect_samples(calls: Sequence[KnownCall], *, mask_other_context: bool) -> tuple[TrainingSample, ...]:
    """One sample for each call from which none goes on, in their order.

    Of the samples that share calls, the one that ends last has their tokens; the others have them as a prompt.

    Args:
        calls: In order.
        mask_other_context: Tokens that were scored behind other ids than those of the sample are not trained.
    """
    last = {call.number: call.number for call in calls}
    for call in reversed(calls):
        if call.parent is not None:
            last[call.parent.number] = max(last[call.parent.number], last[call.number])
    paths: dict[int, list[KnownCall]] = {end: [] for end in sorted({*last.values()})}
    for call in calls:
        paths[last[call.number]].append(call)
    return tuple(_sample_of(path, mask_other_context=mask_other_context) for path in paths.values())


def _sample_of(path: list[KnownCall], *, mask_other_context: bool) -> TrainingSample:
    # Known ids may be equal numbers of another type where a prompt repeats them.
    tokens = [*map(int, path[0].prompt)] if path[0].parent else [*path[0].prompt]
    response = len(tokens)
    behind_other_ids, loss_mask = list[int](), list[int]()
    log_probs, versions, request_ids = list[float](), list[str | None](), list[str]()
    exact = True
    for number, call in enumerate(path):
        if number:
            between = call.prompt[call.rest :]
            tokens += between
            behind_other_ids += [0] * len(between)
            loss_mask += [0] * len(between)
            log_probs += [0.0] * len(between)
            versions += [None] * len(between)
            exact = (exact and call.continues) or tokens == call.prompt
        sampled = call.generation
        count, trained = len(sampled.sampled_ids), exact or not mask_other_context
        tokens += sampled.sampled_ids
        behind_other_ids += [int(not exact)] * count
        loss_mask += [int(trained)] * count
        log_probs += sampled.log_probs if trained else [0.0] * count
        versions += sampled.weight_versions or [sampled.weight_version] * count
        request_ids += [sampled.request_id] if trained else []
    return TrainingSample(
        tokens=tokens,
        response_length=len(tokens) - response,
        loss_mask=loss_mask,
        rollout_log_probs=log_probs,
        behind_other_ids=behind_other_ids,
        weight_versions=versions,
        request_ids=request_ids,
    )
