# SPDX-License-Identifier: Apache-2.0
"""The whole loss on a GPU: the numbers of the CPU, the same bits twice, and one wait for all metrics."""

from argparse import Namespace

import loss_cases
import pytest
import torch
from test_policy_loss_calls import MODES, given_scores
from torch.profiler import ProfilerActivity, profile

from mis_ext.hosts.groups import Groups
from mis_ext.hosts.megatron import Host, Unscored, batch_loss
from mis_ext.hosts.session import current_run
from mis_ext.hosts.slime_miles.policy_loss import on_host
from mis_ext.loss.policy import MILES_METRICS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

HOST = Host(Groups(), given_scores, MILES_METRICS)
KEYS = loss_cases.GATES | loss_cases.KL | {"kl_loss_type": "k3", "entropy_coef": 0.1}


def moved(batch: dict, device: str) -> dict:
    def move(value):
        if isinstance(value, torch.Tensor):
            return value.to(device)
        return [move(x) for x in value] if isinstance(value, list) else value

    return {key: move(value) for key, value in batch.items()}


def computed(args: Namespace, batch: dict) -> tuple:
    batch = batch | {"current": [x.clone().requires_grad_() for x in batch["current"]]}
    scores = given_scores(Unscored(None, batch, None, None, None))
    host = HOST._replace(score=lambda *_: scores)
    found = batch_loss(current_run(args, whole_loss=True), host, batch, batch["logits"])
    return found, torch.autograd.grad(found.loss, [scores.log_prob_T, scores.entropy_T])


@pytest.mark.parametrize("name", MODES)
def test_a_gpu_gives_the_numbers_of_the_cpu_and_the_same_bits_twice(name) -> None:
    args, batch = loss_cases.host_args(**KEYS | MODES[name]), loss_cases.of_lengths([700] * 12)
    (on_cpu, wanted), (first, found), (again, same) = (
        computed(args, moved(batch, device)) for device in ("cpu", "cuda", "cuda")
    )
    torch.testing.assert_close(on_host(first.metrics), on_host(on_cpu.metrics), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close([x.cpu() for x in found], list(wanted), rtol=1e-4, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))
    assert torch.equal(first.loss, again.loss)


@pytest.mark.parametrize("name", MODES)
def test_the_loss_never_waits_and_its_metrics_wait_once(name) -> None:
    args, batch = loss_cases.host_args(**KEYS | MODES[name]), moved(loss_cases.of_lengths([700] * 12), "cuda")
    # The guards look at the first calls of each args at once, and wait for what they see.
    for _ in range(3):
        on_host(computed(args, batch)[0].metrics)
    try:
        torch.cuda.set_sync_debug_mode("error")
        found, _ = computed(args, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        on_host(found.metrics)
    waits = [event.name for event in profiler.events() if "StreamSynchronize" in event.name]
    assert len(waits) <= 1
