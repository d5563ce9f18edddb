# SPDX-License-Identifier: Apache-2.0
"""What a session watches while it runs: how much is rejected, and whether another rank failed."""

import argparse
import math
import warnings
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch

import mis_ext
from mis_ext import MismatchWarning
from mis_ext.hosts import guards
from mis_ext.hosts.guards import Monitor, raise_if_failed, warn_of_rejection

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def totals(
    tokens: float,
    kept_tokens: float,
    sequences: float = 4.0,
    kept_sequences: float = 4.0,
    *,
    valid_tokens: float | None = None,
) -> SimpleNamespace:
    """What a monitor reads of a correction."""
    valid_tokens = tokens if valid_tokens is None else valid_tokens
    watched = torch.tensor([tokens, valid_tokens, kept_tokens, kept_sequences, sequences])
    return SimpleNamespace(watched=watched, weights_T=torch.ones(2))


def rejection_monitor(max_fraction: float) -> Monitor:
    return Monitor(partial(warn_of_rejection, max_fraction))


def observe(monitor: Monitor, corrections: list) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for correction in corrections:
            monitor.observe(attrgetter("watched"), correction, on=correction.weights_T)
    assert all(issubclass(warning.category, MismatchWarning) for warning in caught)
    return [str(warning.message) for warning in caught]


def test_too_much_rejection_is_said_once() -> None:
    monitor, much = rejection_monitor(0.3), totals(100.0, 40.0)
    (message,) = observe(monitor, [much])
    assert "60.0% of the tokens" in message
    assert "mis_max_reject_fraction=0.3" in message
    assert observe(monitor, [much] * 40) == []


def test_tokens_without_a_ratio_are_not_blamed_on_the_bounds() -> None:
    (message,) = observe(rejection_monitor(0.3), [totals(100.0, 40.0, valid_tokens=40.0)] * 2)
    assert "60.0% of the response tokens" in message
    assert "mis_nonfinite_token_fraction" in message


def test_a_session_without_metrics_counts_tokens_without_a_ratio() -> None:
    session = mis_ext.Session(mis_ext.CorrectionConfig(metrics=(), max_reject_fraction=0.3))
    behavior = -torch.rand(100, generator=torch.Generator().manual_seed(0))
    proximal = torch.where(torch.arange(100) < 45, math.nan, behavior)
    streams = mis_ext.PackedStreams(proximal, behavior, torch.ones(100), mis_ext.PackedLayout.whole([100]))
    with pytest.warns(MismatchWarning, match="45.0% of the response tokens"):
        session.correct(streams)


def test_rejected_sequences_count_like_rejected_tokens() -> None:
    monitor = rejection_monitor(0.3)
    (message,) = observe(monitor, [totals(100.0, 90.0, 4.0, 2.0)] * 2)
    assert "50.0% of the sequences" in message


@pytest.mark.parametrize(("max_fraction", "num_warnings"), [(0.6, 0), (0.59, 1), (1.0, 0)])
def test_only_more_than_the_largest_fraction_warns(max_fraction, num_warnings) -> None:
    assert len(observe(rejection_monitor(max_fraction), [totals(100.0, 40.0)] * 20)) == num_warnings


def test_one_call_in_eight_is_looked_at() -> None:
    fine, much = totals(100.0, 99.0), totals(100.0, 1.0)
    for bad_call in range(24):
        calls = [much if call == bad_call else fine for call in range(25)]
        assert len(observe(rejection_monitor(0.5), calls)) == (bad_call % 8 == 0)


def test_calls_without_response_tokens_reject_nothing() -> None:
    assert observe(rejection_monitor(0.0), [totals(0.0, 0.0, 0.0, 0.0)] * 20) == []


# --- status


def status_monitor() -> Monitor:
    return Monitor(raise_if_failed, every=1, merge=torch.maximum)


def hear(monitor: Monitor, status: float | torch.Tensor) -> None:
    monitor.observe(torch.atleast_1d, torch.as_tensor(status), on=torch.as_tensor(status))


# Below 0: the rank cannot compile, which is no failure.
@pytest.mark.parametrize("status", [-math.inf, -3.0])
def test_no_failure_is_no_error(status) -> None:
    monitor = status_monitor()
    for _ in range(100):
        hear(monitor, status)


def test_a_failed_rank_is_named_in_every_call() -> None:
    monitor = status_monitor()
    for rank in (0, 3, 1_000_000):
        hear(monitor, -math.inf)
        with pytest.raises(RuntimeError, match=rf"a call failed on rank {rank};"):
            hear(monitor, rank + 1.0)


# --- numbers that arrive later


def test_numbers_of_several_calls_add_up_until_they_are_enough() -> None:
    seen: list[float] = []
    monitor = Monitor(lambda numbers: seen.append(*numbers) or numbers[0] >= 7.0, every=1, merge=torch.add)
    for number in (1.0, 2.0, 4.0, 8.0):
        monitor.observe(torch.tensor, [number], on=torch.ones(1))
    assert seen == [1.0, 3.0, 7.0]
    assert monitor.is_done


class OnDevice(torch.Tensor):
    """A tensor that says it is on a device."""

    is_cuda = True


def on_device(number: float) -> torch.Tensor:
    return torch.tensor([number]).as_subclass(OnDevice)


class SlowCopies:
    """Stands for ``torch`` in a monitor: the one copy on its way arrives when told."""

    def __init__(self) -> None:
        self.has_arrived = False

    def empty_like(self, numbers: torch.Tensor, **_: object) -> "SlowCopies.OnHost":
        return self.OnHost()

    class OnHost:
        def copy_(self, numbers: torch.Tensor, **_: object) -> None:
            self.tolist = numbers.tolist

    @property
    def cuda(self) -> SimpleNamespace:
        copied = SimpleNamespace(record=lambda: None, query=lambda: self.has_arrived)
        return SimpleNamespace(Event=lambda: copied, is_current_stream_capturing=lambda: False)


@pytest.fixture
def copies(monkeypatch) -> SlowCopies:
    copies = SlowCopies()
    monkeypatch.setattr(guards, "torch", copies)
    return copies


def test_on_a_device_only_the_first_look_waits(copies) -> None:
    seen: list[float] = []
    monitor = Monitor(lambda numbers: seen.append(*numbers), every=1, merge=torch.add)

    def call() -> None:
        monitor.observe(on_device, 1.0, on=on_device(1.0))

    for _ in range(4):
        call()
    assert seen == [1.0]
    copies.has_arrived = True
    # What was sent with the second call, then what was sent when that arrived.
    call()
    call()
    assert seen == [1.0, 2.0, 5.0]


def test_a_failure_is_not_lost_while_an_earlier_status_is_on_its_way(copies) -> None:
    monitor = mis_ext.Session({"use_tis": True})._status
    for status in (-math.inf, -math.inf, 4.0, -math.inf):
        hear(monitor, on_device(status))
    copies.has_arrived = True
    hear(monitor, on_device(-math.inf))
    with pytest.raises(RuntimeError, match="failed on rank 3;"):
        hear(monitor, on_device(-math.inf))


# --- on a GPU


@pytest.fixture
def nobody_waits():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def tiny_call(args: argparse.Namespace, behavior: torch.Tensor) -> None:
    proximal = -torch.rand(len(behavior), device="cuda")
    mis_ext.compute_mis_weights_with_cp(
        args,
        pg_loss=torch.ones(len(behavior), device="cuda"),
        train_log_probs=[proximal],
        rollout_log_probs=[behavior + proximal],
        loss_masks=[torch.ones(len(behavior), device="cuda")],
        total_lengths=[len(behavior) + 3],
        response_lengths=[len(behavior)],
    )


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_later_looks_of_the_guards_do_not_wait(request) -> None:
    args = argparse.Namespace(use_tis=True)
    tiny_call(args, torch.zeros(5, device="cuda"))
    request.getfixturevalue("nobody_waits")
    for _ in range(5):
        tiny_call(args, torch.zeros(5, device="cuda"))

    def go_on() -> None:
        # Nobody waits for the device, which has long done what so small a call asks for.
        for _ in range(1000):
            tiny_call(args, torch.full((5,), -9999.0, device="cuda"))

    with pytest.raises(ValueError, match="placeholders"):
        go_on()


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_the_status_is_read_when_it_has_arrived(request) -> None:
    monitor, fine = status_monitor(), torch.tensor(-math.inf, device="cuda")
    hear(monitor, fine)
    failed = torch.tensor(4.0, device="cuda")
    request.getfixturevalue("nobody_waits")
    for _ in range(100):
        hear(monitor, fine)
    hear(monitor, failed)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()

    def go_on() -> None:
        # The copy on its way may be of a call before; the next one has the failure in it.
        for _ in range(2):
            hear(monitor, fine)
            torch.cuda.synchronize()

    with pytest.raises(RuntimeError, match="failed on rank 3;"):
        go_on()


@pytest.mark.gpu
@needs_gpu
def test_a_failure_of_the_first_call_on_a_gpu_is_seen_at_once() -> None:
    with pytest.raises(RuntimeError, match="failed on rank 3;"):
        hear(status_monitor(), torch.tensor(4.0, device="cuda"))


@pytest.mark.gpu
@needs_gpu
def test_nothing_is_read_while_a_graph_is_captured() -> None:
    monitor, status = status_monitor(), torch.tensor(4.0, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        hear(monitor, status)
        _ = status + 1.0
    with pytest.raises(RuntimeError, match="failed on rank 3;"):
        hear(monitor, status)
