"""From its second call on the hook never waits for the device, and its work does not depend on the data.

On a CPU nothing stalls, so a dispatch mode forbids the operations that would stall a GPU: those whose result, or whose
shape, the host must read.
"""

import pytest
import torch
from cases import GATES, WEIGHTS, args_of, correction_keys, random_samples, sprinkle
from reference import Samples
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import mis_ext

FORBIDDEN = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "equal",
    "allclose",
    "nonzero",
    "argwhere",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
    "histc",
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
READERS = ["cpu", "tolist", "numpy", "item", "__bool__", "__int__", "__float__", "__index__"]
METRICS_ONLY = {"use_tis": False, "get_mismatch_metrics": True, "mis_guard": "warn"}


class Recorder(TorchDispatchMode):
    """Counts the dispatched operations and refuses the ones that synchronise."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.names.append(name)
        leaves = [leaf for leaf in tree_leaves((args[1:], kwargs or {})) if isinstance(leaf, torch.Tensor)]
        by_mask = name in INDEXING and any(leaf.dtype in (torch.bool, torch.uint8) for leaf in leaves)
        unknown_size = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in FORBIDDEN or by_mask or unknown_size:
            raise AssertionError(f"aten::{name} makes the host wait for the device")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_readers(monkeypatch):
    """Every Python-level way to read a tensor's value is an error."""

    def install() -> None:
        def refuse(*_args, **_kwargs):
            raise AssertionError("a tensor's value was read on the host")

        for name in READERS:
            monkeypatch.setattr(torch.Tensor, name, refuse)

    yield install
    monkeypatch.undo()


def call(args, samples: Samples):
    lengths = [m.numel() for m in samples.masks]
    return mis_ext.compute_mis_weights_with_cp(
        args=args,
        pg_loss=torch.ones(sum(lengths), device=samples.train[0].device).requires_grad_(),
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
        total_lengths=[length + 3 for length in lengths],
        response_lengths=lengths,
    )


def settings() -> list[dict]:
    out = [METRICS_ONLY, {**METRICS_ONLY, "mis_metrics": "core"}]
    for index, weight in enumerate(WEIGHTS):
        for gate in GATES:
            normalizer = (
                ["no normaliser", "kept", "valid, micro-batch"][index % 3] if weight[0] != "none" else "no normaliser"
            )
            veto = ["all vetoes", "no veto"][index % 2]
            denominator = ["kept", "fixed"][index % 2]
            keys = correction_keys(weight, gate=gate, veto=veto, normalizer=normalizer, mis_denominator=denominator)
            out.append(keys)
    gates = [{"level": "token", "low": 0.7, "high": 1.5}, {"level": "sequence", "low": 0.2, "high": 4.0}]
    out.append(correction_keys(("token", "truncate"), gate="geometric gate", rs_gates=gates))
    return out


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: torch.unique(x),
        lambda x: torch.repeat_interleave(x, torch.ones(4, dtype=torch.long)),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: float(x[0]),
        lambda x: x.clone().index_put_((x > 0,), x[:1]),
        lambda x: torch.where(x > 0),
        lambda x: torch.bincount(x.long()),
    ],
)
def test_the_recorder_notices_every_way_to_synchronise(read, no_readers):
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    no_readers()
    with pytest.raises(AssertionError, match=r"wait for the device|read on the host"), Recorder():
        read(x)


def test_no_setting_reads_a_value_on_the_host(no_readers):
    first, second = random_samples([5, 1, 9, 3], seed=81), sprinkle(random_samples([4, 7, 2], seed=82), seed=1)
    prepared = []
    for keys in settings():
        args = args_of(keys)
        # The guards of the first call may look at the data.
        call(args, first)
        call(args, first)
        prepared.append((keys, args))
    no_readers()
    for keys, args in prepared:
        with Recorder() as recorder:
            call(args, second)
        assert recorder.names, keys


def test_the_operations_do_not_depend_on_the_data_or_on_the_number_of_samples():
    masked = random_samples([6, 6], seed=83)
    for mask in masked.masks:
        mask.zero_()
    batches = [
        random_samples([5], seed=84),
        random_samples([3, 1, 8] * 21, seed=85),
        sprinkle(random_samples([2, 40, 2000], seed=86), seed=2, share=0.01),
        masked,
    ]
    for keys in settings():
        args = args_of(keys)
        call(args, batches[0])
        call(args, batches[0])
        seen = []
        for samples in batches:
            with Recorder() as recorder:
                call(args, samples)
            seen.append(recorder.names)
        assert all(names == seen[0] for names in seen), [len(names) for names in seen]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_no_setting_synchronises():
    def moved(samples: Samples) -> Samples:
        return Samples(*([x.cuda() for x in column] for column in (samples.train, samples.rollout, samples.masks)))

    first = moved(random_samples([5, 1, 9, 3], seed=81))
    second = moved(sprinkle(random_samples([4, 7, 2], seed=82), seed=1))
    for keys in settings():
        args = args_of(keys)
        call(args, first)
        call(args, first)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            loss, _, _ = call(args, second)
            loss.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
