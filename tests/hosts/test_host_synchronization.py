# SPDX-License-Identifier: Apache-2.0
"""From its second call on the hook never waits for the device, and its work does not depend on the data."""

import argparse

import pytest
import torch
from cases import GATES, WEIGHTS, args_of, correction_keys, random_samples, sprinkle
from reference import Samples
from synchronization import ENOUGH, call, recorded
from torch.utils._python_dispatch import TorchDispatchMode

from mis_ext.correction import layout as layout_module
from mis_ext.correction.layout import PackedLayout, to_device
from mis_ext.hosts import megatron
from mis_ext.hosts.groups import Groups

METRICS_ONLY = {"use_tis": False, "get_mismatch_metrics": True, "mis_guard": "warn", "mis_metrics": "all"}


def settings() -> list[dict]:
    out = [METRICS_ONLY, {**METRICS_ONLY, "mis_metrics": "core"}]
    for index, weight in enumerate(WEIGHTS):
        for gate in GATES:
            normalizer = (
                ["no normalizer", "kept", "valid, micro-batch"][index % 3] if weight[0] != "none" else "no normalizer"
            )
            veto = ["all vetoes", "no veto"][index % 2]
            denominator = ["kept", "fixed"][index % 2]
            keys = correction_keys(weight, gate=gate, veto=veto, normalizer=normalizer, mis_denominator=denominator)
            out.append(keys)
    gates = [{"reduce": "token", "low": 0.7, "high": 1.5}, {"reduce": "sum", "low": 0.2, "high": 4.0}]
    out.append(correction_keys(("token", "truncate"), gate="geometric gate", rs_gates=gates))
    # The warning about too much rejection is given once, and then its watch ends.
    return [keys | ({"mis_max_reject_fraction": 1.0} if keys["use_tis"] else {}) for keys in out]


def inputs_of(samples: Samples) -> list[torch.Tensor]:
    return [*samples.train, *samples.rollout, *samples.masks]


def test_no_setting_reads_a_value_on_the_host(monkeypatch):
    second = sprinkle(random_samples([4, 7, 2], seed=82), seed=1)
    # Every weight, each with one or two of the gates.
    for keys in settings()[::3]:
        args = args_of(keys)
        call(args, ENOUGH)
        call(args, ENOUGH)
        with recorded(monkeypatch, *inputs_of(second)) as recorder:
            call(args, second)
        assert recorder.names, keys


def test_the_operations_do_not_depend_on_the_data_or_on_the_number_of_samples(monkeypatch):
    masked = random_samples([8, 6], seed=83)
    for mask in masked.masks:
        mask.zero_()
    batches = [
        random_samples([8], seed=84),
        random_samples([3, 1, 8] * 21, seed=85),
        sprinkle(random_samples([2, 8, 5], seed=86), seed=2),
        masked,
        random_samples([1500], seed=87),
    ]
    for keys in settings()[::7]:
        args = args_of(keys)
        call(args, ENOUGH)
        call(args, ENOUGH)
        seen = []
        for samples in batches:
            with recorded(monkeypatch, *inputs_of(samples)) as recorder:
                call(args, samples)
            seen.append(recorder.names)
        short, (long,) = seen[:-1], seen[-1:]
        assert all(names == short[0] for names in short), [len(names) for names in short]
        # Reductions over a long response may take more rounds, not one for every so many tokens.
        assert len(long) <= 1.5 * len(short[0]), (len(long), len(short[0]))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compile_", [False, True], ids=["eager", "compiled"])
def test_on_a_gpu_no_setting_synchronizes(compile_):
    def moved(samples: Samples) -> Samples:
        return Samples(*([x.cuda() for x in column] for column in (samples.train, samples.rollout, samples.masks)))

    first = moved(random_samples([5, 1, 9, 3], seed=81))
    second = moved(sprinkle(random_samples([4, 7, 2], seed=82), seed=1))
    # Every setting is compiled, for 10 seconds each.
    for keys in settings()[::12] if compile_ else settings():
        args = args_of(keys | {"mis_compile": compile_})
        call(args, first)
        call(args, first)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            loss, _, _ = call(args, second)
            loss.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("cp_size", [1, 2])
def test_what_the_host_makes_for_the_device_does_not_grow_with_the_tokens(cp_size, monkeypatch):
    def copied(length: int) -> int:
        """Numbers that go to the device, of where three responses stand among logits and tokens."""
        sizes = []

        def recorded(integers, device):
            values = to_device(integers, device)
            sizes.append(values.numel())
            return values

        for module in (megatron, layout_module):
            monkeypatch.setattr(module, "to_device", recorded)
        responses, totals = [length, 1, 2 * length], [length + 3, 2, 2 * length + 1]
        if cp_size == 1:
            layout = PackedLayout.whole(responses)
        else:
            layout = PackedLayout.context_parallel(
                response_lengths=responses, total_lengths=totals, cp_rank=1, cp_size=cp_size
            )
        groups = Groups(cp_rank=cp_size - 1, cp_size=cp_size)
        found = megatron.response_places(layout, groups, total_lengths=totals, padded_lengths=None)
        assert len(found.row_T) == layout.num_local_tokens
        assert len(layout.position_T) == len(layout.sequence_T) == layout.num_local_tokens
        assert len(layout.local_part(torch.zeros(sum(responses)))) == layout.num_local_tokens
        assert len(sizes) == 3
        return sum(sizes)

    assert 0 < copied(5000) == copied(50)


class Operations(TorchDispatchMode):
    """Counts all operations, those on the host too."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore::mis_ext.MismatchWarning")
@pytest.mark.parametrize(("lengths", "most"), [([300, 90, 40], 780), ([70, 200, 160], 840)], ids=["known", "new"])
def test_a_call_with_all_metrics_is_few_operations(lengths, most):
    # On a CPU that is its time where tokens are few; nothing else sees that a change adds some.
    gate = {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.99, "rs_upper_bound": 1.01}
    keys = {"rs_veto_threshold": 1e-4, "tis_batch_normalize": True, "mis_metrics": "all", "mis_guard": "warn"}
    args = argparse.Namespace(use_tis=True, **gate, **keys)
    for samples in (ENOUGH, random_samples([300, 90, 40], seed=83)):
        call(args, samples)
    samples = random_samples(lengths, seed=83)
    with Operations() as operations:
        call(args, samples)
    assert operations.count <= most
