# SPDX-License-Identifier: Apache-2.0
"""Context, tensor and data parallelism give the whole loss of one rank: value, metrics, and every rank's gradient."""

from functools import partial
from importlib.util import find_spec
from unittest import mock

import loss_cases
import pytest
import torch
import torch.distributed as dist
from process_ranks import on_processes
from rows import for_each
from thread_ranks import Rank, current_rank, run_ranks

import mis_ext
from mis_ext.correction import collectives
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.megatron import Host, VocabularyPart, batch_loss, fused_scores, plain_scores
from mis_ext.hosts.session import Session, current_run
from mis_ext.loss.policy import MILES_METRICS, groups_of_sums
from mis_ext.methods import batch as batch_sums

REDUCER = "custom_pg_loss_reducer_function_path"
GSPO = {"advantage_estimator": "gspo"}
KEPT_BY_BOTH = loss_cases.GATES_ALONE | {
    "mis_loss_method": {"name": "token_mis", "low": 0.9, "high": 1.1},
    "mis_loss_denominator": "kept",
    "eps_clip": 0.2,
    "eps_clip_high": None,
}
MODES = {
    "bypass": {"mis_loss_mode": "bypass", "use_rollout_logprobs": True} | loss_cases.SEQUENCES,
    "reinforce": {"mis_loss_mode": "reinforce", "use_rollout_logprobs": True} | loss_cases.GATES,
    "kept": {"mis_loss_denominator": "kept"} | loss_cases.GATES,
    "kept by method and gates": KEPT_BY_BOTH,
    "sequence": {"mis_loss_denominator": "sequence"} | loss_cases.GATES,
    "reducer": {REDUCER: "loss_cases.reduce_by_constant"},
    "gspo, reducer, gates": GSPO | {REDUCER: "loss_cases.reduce_by_constant"} | loss_cases.GATES,
    "segments": loss_cases.GATES | {"rs_gates": [{"reduce": "segment_mean", "low": 0.9, "high": 1.1}]},
}
AVERAGED = {
    "mis_loss_method": "reinforce_sequence_snis",
    "use_rollout_logprobs": True,
    "eps_clip": 0.2,
    "eps_clip_high": None,
}
# A reducer by the lengths of whole responses is for one rank.
OPTIONS = {name: keys for name, keys in loss_cases.OPTIONS.items() if "reducer" not in name} | MODES


def computed(groups: Groups, keys: dict, batch: dict, *, is_padded: bool = False) -> tuple[torch.Tensor, dict]:
    """The gradient in this rank's logits, and loss and metrics."""
    args = loss_cases.host_args(**keys | ({"qkv_format": "bshd"} if is_padded else {}))
    place = {"cp_rank": groups.cp_rank, "cp_size": groups.cp_size, "is_padded": is_padded}
    local = loss_cases.with_options(loss_cases.local_batch(batch, **place), args)
    logits = local.pop("logits").requires_grad_()
    found = batch_loss(current_run(args, whole_loss=True), Host(groups, plain_scores, MILES_METRICS), local, logits)
    found.loss.backward()
    return logits.grad, {"sum": found.loss.detach(), **found.metrics}


def assert_parts(parts: list, whole: tuple, *, is_padded: bool) -> None:
    """The ranks' numbers add up to those of one rank, and their gradients are its gradient, cut."""
    for part in parts:
        if isinstance(part, Exception):
            raise part
    cp_size = len(parts)
    totals = {name: sum(part[1][name] for part in parts) for name in whole[1]}
    torch.testing.assert_close(totals, whole[1], rtol=1e-5, atol=1e-6)
    rows = whole[0][0].split(loss_cases.TOTALS)
    for rank, (gradient, _) in enumerate(parts):
        cut = [
            loss_cases.local_rows(
                x, cp_rank=rank, cp_size=cp_size, length=loss_cases.MAX_SEQ_LEN if is_padded else len(x)
            )
            for x in rows
        ]
        wanted = torch.stack(cut) if is_padded else torch.cat(cut)[None]
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_context_parallel_ranks_give_the_loss_of_one(name) -> None:
    batch = loss_cases.whole_batch()
    whole = computed(Groups(), OPTIONS[name], batch)
    for cp_size, is_padded in ((2, True), (4, False)):

        def on_rank(rank: Rank, is_padded=is_padded) -> tuple:
            return computed(rank.groups, OPTIONS[name], batch, is_padded=is_padded)

        assert_parts(run_ranks(on_rank, cp_size=cp_size), whole, is_padded=is_padded)


def failing_on_rank_1(
    rank: Rank, keys: dict, extra: frozenset, *, spoiled: dict | None = None, reducer: str = ""
) -> tuple:
    """The gradient, or the error, where rank 1 has its own reducer or batch; and whether the loss sums over ranks."""
    given = {REDUCER: reducer if rank.number == 1 else "loss_cases.reduce_by_constant"} if reducer else {}
    cp_size = 3 - rank.groups.dp_size
    local = loss_cases.local_batch(loss_cases.whole_batch(), cp_rank=rank.cp_rank, cp_size=cp_size)
    logits = local.pop("logits").requires_grad_()
    if rank.number == 1:
        local |= spoiled or {}
    run = current_run(loss_cases.host_args(**keys | given), whole_loss=True)
    groups = {"cp_group": rank.groups.cp_group, "dp_group": rank.groups.dp_group}
    sums = groups_of_sums(run.config.loss.settings, **groups, extra_metrics=extra)
    try:
        loss = batch_loss(run, Host(rank.groups, plain_scores, extra), local, logits).loss
        return torch.autograd.grad(loss, logits)[0], bool(sums)
    except Exception as error:
        return error, bool(sums)


LOSSES_OF_RANKS = [{}, GSPO, AVERAGED, loss_cases.GATES, loss_cases.GATES | GSPO]


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("keys", LOSSES_OF_RANKS)
@pytest.mark.parametrize("extra", [frozenset(), MILES_METRICS])
@pytest.mark.parametrize(("name", "value"), [("advantages", []), ("response_lengths", None)])
def test_an_error_of_one_rank_leaves_none_waiting(dp_size, keys, extra, name, value) -> None:
    """Whatever the loss exchanges, sums of its own, of a correction or nothing."""
    good, bad = run_ranks(
        lambda rank: failing_on_rank_1(rank, keys, extra, spoiled={name: value}), cp_size=3 - dp_size, dp_size=dp_size
    )
    assert isinstance(bad[0], (TypeError, ValueError))
    assert name in str(bad[0])
    assert_told(*good, is_corrected="use_rs" in keys)


@pytest.mark.parametrize("dp_size", [1, 2])
@pytest.mark.parametrize("keys", LOSSES_OF_RANKS)
@pytest.mark.parametrize("extra", [frozenset(), MILES_METRICS])
@pytest.mark.parametrize(
    ("reducer", "error"),
    [
        ("loss_cases.forgotten", AttributeError),
        ("loss_cases.refuse_masks", ZeroDivisionError),
        ("loss_cases.refuse_loss", ZeroDivisionError),
    ],
)
def test_a_reducer_that_fails_on_one_rank_leaves_none_waiting(dp_size, keys, extra, reducer, error) -> None:
    good, bad = run_ranks(
        lambda rank: failing_on_rank_1(rank, keys, extra, reducer=reducer), cp_size=3 - dp_size, dp_size=dp_size
    )
    assert isinstance(bad[0], error)
    assert_told(*good, is_corrected="use_rs" in keys and error is AttributeError)


OF_METHODS = {"eps_clip": 0.2, "eps_clip_high": None}
OF_SKIPPED = OF_METHODS | {"use_rollout_logprobs": True}


@pytest.mark.parametrize("dp_size", [1, 2])
@for_each("keys, extra", [
    (GSPO, MILES_METRICS),
    (AVERAGED, frozenset()),
    ({"use_opsm": True, "opsm_delta": 1e-4}, MILES_METRICS),
    *((OF_METHODS | {"mis_loss_method": name}, frozenset()) for name in ("segment_rs", "ctpo", "trm")),
    *((OF_SKIPPED | {"mis_loss_method": name}, frozenset()) for name in ("p3o", "m2po", "vaco")),
    (loss_cases.GATES | GSPO, frozenset()),
    (KEPT_BY_BOTH, frozenset()),
])  # fmt: skip
def test_an_error_between_two_sums_of_a_loss_is_told_behind_them(dp_size, keys, extra) -> None:
    gather, num_sums = collectives.gather_rows, 0
    for fails_before in range(20):
        seen = 0

        def gather_or_fail(row: torch.Tensor, group: object, fails_before=fails_before) -> torch.Tensor:
            nonlocal seen
            if current_rank() == 1:
                seen += 1
                if seen == fails_before + 1:
                    raise torch.OutOfMemoryError("out of memory, says the test")
            return gather(row, group)

        with mock.patch.object(batch_sums, "gather_rows", gather_or_fail):
            good, bad = run_ranks(
                lambda rank: failing_on_rank_1(rank, keys, extra), cp_size=3 - dp_size, dp_size=dp_size
            )
        if seen <= fails_before:
            # One sum more than there are.
            break
        num_sums += 1
        assert isinstance(bad[0], torch.OutOfMemoryError)
        assert str(good[0]) == "a call failed on rank 1; see the error of that rank"
    assert isinstance(good[0], torch.Tensor)
    assert (num_sums > 0) is good[1]
    assert fails_before == num_sums


@pytest.mark.parametrize(
    ("keys", "dp_size"), [(AVERAGED, 1), (AVERAGED, 2), ({"use_opsm": True, "opsm_delta": 1e-4}, 1)]
)
def test_an_error_between_the_status_and_the_sums_is_told_behind_them(keys, dp_size) -> None:
    hear = Session._check_status

    def hear_or_fail(session: Session, status: torch.Tensor) -> None:
        if current_rank() == 1:
            raise torch.OutOfMemoryError("out of memory, says the test")
        hear(session, status)

    with mock.patch.object(Session, "_check_status", hear_or_fail):
        good, bad = run_ranks(
            lambda rank: failing_on_rank_1(rank, keys, MILES_METRICS), cp_size=3 - dp_size, dp_size=dp_size
        )
    assert isinstance(bad[0], torch.OutOfMemoryError)
    assert_told(*good, is_corrected=False)


def assert_told(good, is_waiting, *, is_corrected) -> None:
    if is_waiting or is_corrected:
        assert isinstance(good, RuntimeError)
        assert str(good) == "a call failed on rank 1; see the error of that rank"
    else:
        # A loss without a number of other ranks is as good as it was.
        assert isinstance(good, torch.Tensor)


# --- gloo processes


def failing_tensor_parallel(rank: int) -> None:
    """Two ranks share a vocabulary, two the batch. Rank 1 cannot read its logits: all four hear of it."""
    tp_group, dp_group = (
        [dist.new_group(ranks) for ranks in pairs][place]
        for pairs, place in ((([0, 1], [2, 3]), rank // 2), (([0, 2], [1, 3]), rank % 2))
    )
    local = loss_cases.local_batch(loss_cases.whole_batch(), cp_rank=0, cp_size=1)
    half = loss_cases.VOCABULARY // 2
    logits = local.pop("logits")[..., rank % 2 * half : (rank % 2 + 1) * half]
    score = partial(fused_scores, part=VocabularyPart(tp_group, rank % 2), temperature=1.0)
    host = Host(Groups.of_process_groups(dp_group=dp_group), score)
    kind, message = {
        0: (RuntimeError, "tensor-parallel rank 1 failed to score"),
        1: (TypeError, "logits must be floating-point"),
        2: (RuntimeError, "failed on rank 0;"),
        3: (RuntimeError, "failed on rank 1;"),
    }[rank]
    with pytest.raises(kind, match=message):
        batch_loss(
            current_run(loss_cases.host_args(**loss_cases.GATES), whole_loss=True),
            host,
            local,
            logits.int() if rank == 1 else logits,
        )


def megatron(rank: int) -> None:
    """Megatron-Core says who is who: two ranks share a vocabulary, two share sequences; nobody passes a group."""
    if find_spec("megatron") is None:
        return
    from megatron.core import mpu

    mpu.initialize_model_parallel(tensor_model_parallel_size=2, context_parallel_size=2)
    keys = loss_cases.GATES | {"entropy_coef": 0.1}
    batch = loss_cases.whole_batch()
    place = {"cp_rank": mpu.get_context_parallel_rank(), "cp_size": 2}
    local = loss_cases.local_batch(batch, **place)
    half = loss_cases.VOCABULARY // 2
    mine = slice(mpu.get_tensor_model_parallel_rank() * half, (mpu.get_tensor_model_parallel_rank() + 1) * half)
    logits = local.pop("logits")[..., mine].clone().requires_grad_()
    loss, metrics = mis_ext.policy_loss(loss_cases.host_args(**keys), local, logits)
    loss.backward()
    scaled, number, reported = mis_ext.make_loss_func(loss_cases.host_args(**keys), local)(logits)
    mpu.destroy_model_parallel()
    alone_gradient, alone = computed(Groups(), keys, batch)
    # Megatron-Core's schedule divides by the number, and averages over the ranks.
    assert int(number) == len(loss_cases.TOTALS)
    mean = scaled.detach() / number
    dist.all_reduce(mean)
    torch.testing.assert_close(mean / 4, alone["sum"] / number, rtol=1e-5, atol=1e-6)
    total, count = reported["entropy_loss"].clone().unbind()
    pair = torch.stack([total, count])
    dist.all_reduce(pair)
    torch.testing.assert_close(pair[0] / pair[1], alone["entropy_loss"] / number, rtol=1e-5, atol=1e-6)
    totals = torch.stack([*metrics.values()])
    dist.all_reduce(totals)
    # Both tensor-parallel ranks say the same.
    wanted = torch.stack([alone[name] for name in metrics])
    torch.testing.assert_close(totals / 2, wanted, rtol=1e-5, atol=1e-6)
    cut = [loss_cases.local_rows(x, length=len(x), **place) for x in alone_gradient[0].split(loss_cases.TOTALS)]
    torch.testing.assert_close(logits.grad, torch.cat(cut)[None, :, mine], rtol=1e-5, atol=1e-6)


CHECKS = {check.__name__: check for check in (failing_tensor_parallel, megatron)}

test_on_four_processes = on_processes(CHECKS, world_size=4, seconds=30)
