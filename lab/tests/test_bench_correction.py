# SPDX-License-Identifier: Apache-2.0
"""The benchmark: its baseline is the hosts' reference example, its inputs are as told, and wrong numbers end it."""

import json
import traceback
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import bench_correction
import host_baseline
import host_loop
import measuring
import pytest
import torch
import torch.distributed as dist
import verifying
from cases import args_of, call_hook, flat, random_samples
from parity_cases import averaged, batch, compat, settings_of
from process_ranks import joined, run_processes
from reference import Samples
from torch.autograd import DeviceType
from workload import Shape, Workload, World
from zigzag import take

LEVELS = ["token", "sequence", "geometric"]
MODES = ["truncate", "clip", "mask"]
# float32 `exp` at up to 20, doubled for chi-square, and a few means after it; k3 and chi-square near 0.
RTOL, ATOL = 5e-6, 2e-6
QUICK = ["--device", "cpu", "--contenders", "eager", "baseline", "--repeats", "5", "--budget", "0.01"]


def grid() -> list[dict]:
    """Everything that the reference example can do."""
    settings = [{"use_tis": False}]
    for level, mode, rs_level, veto, normalize in product(LEVELS, MODES, [None, *LEVELS], [False, True], [False, True]):
        if not (normalize and level == "geometric"):
            settings.append(settings_of(level, mode, rs_level, veto=veto, normalize=normalize))
    return settings


def call_baseline(keys: dict, samples: Samples, pg_loss: torch.Tensor) -> tuple:
    lengths = [m.numel() for m in samples.masks]
    return host_baseline.compute_mis_weights_with_cp(
        args_of(keys),
        pg_loss=pg_loss,
        train_log_probs=samples.train,
        rollout_log_probs=samples.rollout,
        loss_masks=samples.masks,
        total_lengths=[length + 3 for length in lengths],
        response_lengths=lengths,
    )


def assert_near(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(
        found.double(), wanted.double(), rtol=RTOL, atol=ATOL, msg=lambda text: f"{what}: {text}"
    )


def test_the_baseline_is_the_reference_example_in_float32() -> None:
    samples = batch(seed=50, masked_sample=True)
    response = flat(samples.masks) != 0
    pg_loss = torch.linspace(-1.0, 2.0, len(response)).requires_grad_()
    for keys in grid()[::5]:
        wanted = host_loop.correct(keys, train=samples.train, rollout=samples.rollout, masks=samples.masks)
        loss, masks, metrics = call_baseline(keys, samples, pg_loss)
        assert torch.equal(flat(masks), flat(wanted.masks)), keys
        if keys["use_tis"]:
            assert_near("loss", loss.detach(), flat(wanted.weights) * pg_loss.detach())
            (weights,) = torch.autograd.grad(loss.sum(), pg_loss)
            assert_near("gradient", weights, flat(wanted.weights))
        else:
            assert loss is pg_loss
        assert list(metrics) == list(wanted.metrics)
        for name, values in metrics.items():
            assert not values.requires_grad
            assert_near(name, values[response], flat(wanted.metrics[name])[response])


def test_the_baseline_is_the_package_with_the_keys_of_miles_compat() -> None:
    for keys in grid()[1::5]:
        # A fully masked sample counts in the example's mean over sequences.
        samples = batch(seed=50, masked_sample=keys["tis_level"] == "token")
        response = flat(samples.masks) != 0
        pg_loss = torch.linspace(-1.0, 2.0, len(response))
        loss, masks, metrics = call_baseline(keys, samples, pg_loss)
        package_loss, package_masks, package_metrics = call_hook(compat(keys), samples, pg_loss=pg_loss)
        assert torch.equal(flat(package_masks), flat(masks)), keys
        assert_near("loss", package_loss, loss)
        for name, values in metrics.items():
            per_sample = averaged(values.split([m.numel() for m in samples.masks]), samples.masks)
            assert_near(name, package_metrics[name][response], per_sample[response])


def test_a_run_verifies_and_measures_every_contender_it_can(tmp_path, capsys) -> None:
    file = tmp_path / "rows.json"
    bench_correction.main([*QUICK, "--shapes", "3x20", "1x50", "--json", str(file)])
    tables = capsys.readouterr().out
    assert "### 3x20" in tables
    assert "### 1x50" in tables
    rows = json.loads(file.read_text())["rows"]
    lines = {(row["shape"], row["configuration"], row["contender"], row.get("layout")): row for row in rows}
    assert len(rows) == len(lines) == 2 * len(bench_correction.CONFIGS) * 3
    for (shape, config, _, _), row in lines.items():
        assert 0 < row["min_s"] <= row["median_s"] <= row["max_s"]
        assert row["host_s"] <= row["max_s"]
        assert row["repeats"] >= 5
        assert row["collectives"] == 0
        assert row["speedup"] * row["median_s"] == pytest.approx(lines[shape, config, "baseline", "any"]["median_s"])
    gated = lines["3x20", "gated MIS", "baseline", "any"]
    # Five looks at the device per sample, one at the normalizer; what the package looks at does not grow with samples.
    assert gated["host_syncs"] == 5 * 3 + 1
    three, one = (lines[shape, "gated MIS", "eager", "same"]["host_syncs"] for shape in ("3x20", "1x50"))
    assert three == one
    # Three streams and the loss in; the loss, the masks and 23 metrics out; all of 4 bytes.
    assert gated["bytes_moved"] == 4 * 60 * (4 + 2 + 23)


def test_a_wrong_contender_ends_the_run_before_it_is_timed(monkeypatch, capsys) -> None:
    right = host_baseline.compute_mis_weights_with_cp

    def wrong(args, **keywords):
        loss, masks, metrics = right(args, **keywords)
        return loss * 1.001, masks, metrics

    monkeypatch.setattr(host_baseline, "compute_mis_weights_with_cp", wrong)
    with pytest.raises(SystemExit, match=r"not timed, because a result is wrong.*baseline: loss"):
        bench_correction.main([*QUICK, "--shapes", "3x20", "--configs", "gated MIS"])
    assert "| median ms |" not in capsys.readouterr().out


def test_a_difference_in_the_masks_or_beyond_rounding_is_found() -> None:
    output = (torch.ones(3), [torch.ones(2), torch.ones(1)], {"mis_kl": torch.ones(3)})
    close = (torch.ones(3) * (1 + 5e-7), [torch.ones(2), torch.ones(1)], {"mis_kl": torch.ones(3)})
    verifying.check_same("x", close, output)
    with pytest.raises(verifying.Unequal, match="x: loss"):
        verifying.check_same("x", close, output, rtol=0.0, atol=0.0)
    with pytest.raises(verifying.Unequal, match="x: masks"):
        verifying.check_same("x", (output[0], [torch.ones(2), torch.zeros(1)], output[2]), output)
    with pytest.raises(verifying.Unequal, match="mis_k3_kl"):
        verifying.check_same("x", (*output[:2], {"mis_k3_kl": torch.ones(3)}), output)


@pytest.mark.parametrize("shape", ["4x30", "1x200"])
def test_new_layouts_are_new_and_the_same_layout_stays(shape: str) -> None:
    workload = Workload(Shape.parse(shape), world=World(torch.device("cpu")), seed=3)
    same = {tuple(workload.same_layout()["response_lengths"]) for _ in range(20)}
    new = [tuple(workload.new_layout()["response_lengths"]) for _ in range(20)]
    assert len(same) == 1
    assert len({*same, *new}) == 21
    sets = [workload.same_layout()["train_log_probs"][0] for _ in range(2)]
    assert not torch.equal(*sets)


class Profile:
    """What the profiler hands over, from (name, is on the device, is an annotation, microseconds)."""

    def __init__(self, *events: tuple[str, bool, bool, int]) -> None:
        kinds = [DeviceType.CPU, DeviceType.CUDA]
        made = [
            SimpleNamespace(
                name=lambda name=name: name,
                device_type=lambda on_device=on_device: kinds[on_device],
                is_user_annotation=lambda is_annotation=is_annotation: is_annotation,
                duration_ns=lambda duration=duration: duration * 1000,
            )
            for name, on_device, is_annotation, duration in events
        ]
        self.profiler = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: made))

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def test_device_work_is_counted_by_kind_and_without_what_the_profiler_does(monkeypatch) -> None:
    stop = ("cudaDeviceSynchronize", False, False, 9)
    call = [
        ("cudaLaunchKernel", False, False, 3),
        ("reduce_kernel", True, False, 10),
        ("Memcpy HtoD (Pinned -> Device)", True, False, 2),
        ("Memset (Device)", True, False, 1),
        ("nccl:all_gather", True, True, 90),
        ("ncclDevKernel_AllGather_RING_LL", True, False, 80),
        ("cudaStreamSynchronize", False, False, 5),
        ("cudaStreamWaitEvent", False, False, 1),
    ]
    profiles = iter([Profile(stop), Profile(*call * measuring.PROFILED_CALLS, stop)])
    monkeypatch.setattr(measuring, "profile", lambda **_: next(profiles))
    work = measuring.profile_device(dict, dict, world=World(torch.device("cpu")), seconds_per_call=1e-3)
    expected = measuring.DeviceWork(13e-6, 80e-6, kernels=2, copies=2, synchronizations=1)
    assert work == pytest.approx(expected)


# --- context parallelism


def work(rank: int, folder: str) -> None:
    """The baseline's part of some settings, what is exchanged, then a whole run; writes down what fails."""
    failure = ""
    try:
        with joined(rank, 2, folder, seconds=60), pytest.MonkeyPatch.context() as patch:
            compare_with_whole_responses(rank)
            patch.setenv("WORLD_SIZE", "2")
            file = str(Path(folder) / "rows.json")
            choice = ["--cp", "2", "--shapes", "5x40", "--configs", "token gates"]
            bench_correction.main([*QUICK, *choice, "--json", file])
    except BaseException:
        failure = traceback.format_exc()
        raise
    finally:
        (Path(folder) / f"{rank}.txt").write_text(failure)


def compare_with_whole_responses(rank: int) -> None:
    samples = random_samples([5, 1, 19, 3, 12, 33], seed=8, outliers=0.1)
    lengths = [m.numel() for m in samples.masks]
    totals = [length + prompt for length, prompt in zip(lengths, [1, 2, 30, 5, 3, 4], strict=True)]
    padded = [max(totals) + 5] * len(totals)
    world = World(torch.device("cpu"), rank, 2, cp_rank=rank, cp_size=2, cp_group=dist.group.WORLD)
    for turn, keys in enumerate(grid()[::9]):
        # Every other setting with padded samples.
        max_seq_lens = padded if turn % 2 else None
        place = {"total_lengths": totals, "cp_rank": rank, "cp_size": 2, "padded_lengths": max_seq_lens}
        whole = host_loop.correct(keys, train=samples.train, rollout=samples.rollout, masks=samples.masks)
        response = flat(take(samples.masks, **place)) != 0
        pg_loss = torch.linspace(-1.0, 2.0, len(response))
        loss, masks, metrics = host_baseline.compute_mis_weights_with_cp(
            args_of(keys, qkv_format="bshd" if max_seq_lens else "thd"),
            pg_loss=pg_loss,
            train_log_probs=take(samples.train, **place),
            rollout_log_probs=take(samples.rollout, **place),
            loss_masks=samples.masks,
            total_lengths=totals,
            response_lengths=lengths,
            parallel_state=world.parallel_state,
            max_seq_lens=max_seq_lens,
        )
        assert torch.equal(flat(masks), flat(whole.masks)), keys
        if keys["use_tis"]:
            assert_near("loss", loss, flat(take(whole.weights, **place)) * pg_loss)
        for name, values in metrics.items():
            assert_near(name, values[response], flat(take(whole.metrics[name], **place))[response])


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    try:
        run_processes(work, str(folder), world_size=2)
    except Exception as error:
        failures = [file.read_text()[-1500:] for file in folder.glob("*.txt")]
        raise AssertionError("\n".join(failures)) from error
    return folder


@pytest.mark.distributed
@pytest.mark.whole_run
def test_two_context_parallel_ranks_share_the_baseline_and_a_run(of_two_ranks: Path) -> None:
    found = json.loads((of_two_ranks / "rows.json").read_text())["rows"]
    rows = {(row["contender"], row.get("layout")): row for row in found}
    # Two full-length collectives per sample against a few small ones.
    assert rows["baseline", "any"]["collectives"] == 2 * 5
    assert rows["baseline", "any"]["collective_bytes"] == 2 * 4 * 5 * 40
    assert 0 < rows["eager", "same"]["collectives"] <= 3
    assert rows["eager", "new"]["collectives"] <= 3
