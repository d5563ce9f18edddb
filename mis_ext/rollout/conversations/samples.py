"""Training samples from calls that go on from each other: every call in one sample, as a path of their tree."""

from __future__ import annotations

from collections.abc import Sequence

from mis_ext.rollout.conversations.known_call import KnownCall
from mis_ext.rollout.generation import TrainingSample


def collect_samples(calls: Sequence[KnownCall]) -> tuple[TrainingSample, ...]:
    """One sample for each call from which none goes on, in their order.

    Of the samples that share calls, the one that ends last has their tokens; the others have them as a prompt.

    Args:
        calls: In order.
    """
    last = {call.number: call.number for call in calls}
    for call in reversed(calls):
        if call.ancestor is not None:
            last[call.ancestor.number] = max(last[call.ancestor.number], last[call.number])
    paths: dict[int, list[KnownCall]] = {end: [] for end in sorted({*last.values()})}
    for call in calls:
        paths[last[call.number]].append(call)
    return tuple(_sample_of(path) for path in paths.values())


def _sample_of(path: list[KnownCall]) -> TrainingSample:
    # Known ids may be equal numbers of another type where a prompt repeats them.
    tokens = [*map(int, path[0].prompt)] if path[0].ancestor else [*path[0].prompt]
    response = len(tokens)
    loss_mask, log_probs = list[int](), list[float]()
    versions, request_ids = list[str | None](), list[str]()
    for number, call in enumerate(path):
        if number:
            between = call.prompt[len(tokens) :]
            tokens += between
            loss_mask += [0] * len(between)
            log_probs += [0.0] * len(between)
            versions += [None] * len(between)
        sampled = call.generation
        count = len(sampled.sampled_ids)
        tokens += sampled.sampled_ids
        loss_mask += [1] * count
        log_probs += sampled.log_probs
        versions += sampled.weight_versions or [sampled.weight_version] * count
        request_ids.append(sampled.request_id)
    return TrainingSample(
        tokens=tokens,
        response_length=len(tokens) - response,
        loss_mask=loss_mask,
        rollout_log_probs=log_probs,
        weight_versions=versions,
        request_ids=request_ids,
    )
