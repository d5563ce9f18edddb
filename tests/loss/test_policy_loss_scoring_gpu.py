# SPDX-License-Identifier: Apache-2.0
"""Fused scoring in the hosts on a GPU: their numbers, no wait, and no launch more for more samples."""

import loss_cases
import pytest
import torch
from host_stand_ins import HOSTS, called, running
from test_policy_loss_gpu import moved
from test_policy_loss_scoring import HOT, assert_same
from torch.profiler import ProfilerActivity, profile

from mis_ext.hosts.megatron import batch_loss
from mis_ext.hosts.session import current_run
from mis_ext.hosts.slime_miles.policy_loss import IDS, OFFSETS, find_host, find_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CASES = {
    "slime": ("slime", HOT, False),
    "slime, top-p": ("slime", loss_cases.NOT_RECORDED["top-p, gates, hot"], False),
    "miles": ("miles", HOT, False),
    "miles, padded": ("miles", HOT | {"qkv_format": "bshd"}, True),
}


def on_gpu(batch: dict) -> dict:
    """What the hosts hold there; slime keeps its lists of top-p on the host."""
    return moved(batch, "cuda") | {key: batch[key] for key in (IDS, OFFSETS) if key in batch}


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("backend", ["eager", "triton"])
@pytest.mark.parametrize("name", CASES)
def test_it_gives_the_loss_with_the_hosts_own_log_probs(monkeypatch, name, backend, inplace) -> None:
    monkeypatch.setenv("MIS_EXT_BACKEND", backend)
    host, keys, is_padded = CASES[name]
    whole = loss_cases.with_top_p(loss_cases.whole_batch(), unrecorded=3)
    batch = on_gpu(loss_cases.local_batch(whole, is_padded=is_padded))
    with running(host):
        wanted = called(keys | {"mis_loss_scoring": "host"}, dict(batch))
        found = called(keys | {"mis_loss_inplace": inplace}, dict(batch))
    assert_same(found, wanted)


def micro_batch(num_samples: int) -> dict:
    return on_gpu(loss_cases.with_top_p(loss_cases.of_lengths([64] * num_samples)))


@pytest.mark.parametrize("name", ["slime", "slime, top-p", "miles"])
def test_it_never_waits_for_the_device_on_the_way(name) -> None:
    host, keys, _ = CASES[name]
    args = loss_cases.host_args(**keys, mis_loss_inplace=True)
    run, batch = current_run(args, whole_loss=True), micro_batch(16)
    with running(host):
        try:
            # The guards look at the first calls at once, and kernels compile.
            for mode in ("default", "default", "default", "error"):
                logits = torch.randn(1, 16 * 67, 1000, device="cuda", requires_grad=True) * 1.0
                torch.cuda.set_sync_debug_mode(mode)
                batch_loss(run, find_host(args, run.config, *find_ranks()), batch, logits).loss.backward()
                torch.cuda.set_sync_debug_mode("default")
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("host", HOSTS)
def test_more_samples_are_no_more_launches(host) -> None:
    args = loss_cases.host_args(**HOT)
    run = current_run(args, whole_loss=True)
    launches = []
    with running(host):
        for num_samples in (40, 40, 8, 24):
            batch = micro_batch(num_samples)
            logits = torch.randn(1, num_samples * 67, 1000, device="cuda", requires_grad=True)
            # The mask is looked at in one call of eight, or of four with a correction: in none that is measured.
            for _ in range(7):
                batch_loss(run, find_host(args, run.config, *find_ranks()), batch, logits)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiler:
                batch_loss(run, find_host(args, run.config, *find_ranks()), batch, logits).loss.backward()
                torch.cuda.synchronize()
            launches.append(sum("Launch" in event.name for event in profiler.events()))
    assert launches[1] == launches[2] == launches[3] > 10
