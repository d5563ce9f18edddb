# SPDX-License-Identifier: Apache-2.0
"""Each probe of invariance finds what only it can find; noise, errors and thread counts."""

import json
import math

import pytest
import torch
from batch_probes import NUM_ROWS, ascending_rows, normal, outcomes, probe_of, rotated_sum
from torch import nn

from mis_ext.onpolicy.invariance import InvarianceReport, Probe, check_batch_invariance

pytestmark = pytest.mark.usefixtures("one_thread")


def triggered(condition):
    return lambda x: x + 1.0 if condition(x) else x + 0.0


TRIGGERS = {
    "chunks of 2": lambda x: len(x) == 2,
    "chunks of 3": lambda x: len(x) == 3,
    "chunks of 5": lambda x: len(x) == 5,
    "chunks of 8": lambda x: len(x) == 8,
    "chunks of 16": lambda x: len(x) == 16,
    "reversed": lambda x: len(x) == NUM_ROWS and x[0, 0] == NUM_ROWS and x[1, 0] == NUM_ROWS - 1,
    "permuted": lambda x: len(x) == NUM_ROWS and x[:, 0].diff().sign().unique().numel() == 2,
    "zeros before": lambda x: (x[0] == 0).all(),
    "zeros after": lambda x: (x[-1] == 0).all(),
    "huge rows before": lambda x: (x[0] > 1e15).all(),
    "huge rows after": lambda x: (x[-1] > 1e15).all(),
    "NaN rows before": lambda x: x[0].isnan().all(),
    "NaN rows after": lambda x: x[-1].isnan().all(),
    "strided storage": lambda x: x.stride() == (12, 1),
    "transposed storage": lambda x: len(x) > 1 and x.stride() == (1, NUM_ROWS),
    "1 thread": lambda x: torch.get_num_threads() == 1,
    "2 threads": lambda x: torch.get_num_threads() == 2,
    "4 threads": lambda x: torch.get_num_threads() == 4,
}


@pytest.mark.parametrize("name", TRIGGERS)
def test_each_probe_finds_what_only_it_can_find(name):
    torch.set_num_threads(3)
    report = check_batch_invariance(triggered(TRIGGERS[name]), ascending_rows())
    found = outcomes(report, "batch-dependent") - {name}
    # Drawn are chunk sizes, whose last chunk may have any size, and those that are tried with other thread counts.
    assert found == ({x for x in found if x not in TRIGGERS or "thread" in x} if "chunks" in name else set())
    assert 0 < probe_of(report, name).num_different <= NUM_ROWS
    assert report.kind == "batch-dependent"
    assert outcomes(report, "failed", "not run", "rounding", "not repeatable") == set()


def test_a_batch_of_all_rows_and_sevens_are_probed_with_every_thread_count():
    for condition, extra in ((lambda x: len(x) == NUM_ROWS, "full batch"), (lambda x: len(x) == 7, "chunks of 7")):
        report = check_batch_invariance(triggered(condition), ascending_rows())
        assert {extra, "1 thread", "2 threads", "4 threads"} <= outcomes(report, "batch-dependent")


def test_another_seed_draws_other_chunks_threads_and_factors():
    def tried(seed):
        return {probe.name for probe in check_batch_invariance(lambda x: x + 0, ascending_rows(), seed=seed).probes}

    first, again, second = tried(0), tried(0), tried(1)
    assert first == again
    for what in ("chunks of", "threads", "rows times"):
        assert any(what in name for name in second - first), what


def test_large_numbers_are_tried_too():
    report = check_batch_invariance(lambda x: x + 1.0 * ((x > 50).all() & (len(x) > 1)), ascending_rows() * 0 + 1)
    assert report.kind == "batch-dependent"
    assert outcomes(report, "equal") >= {"full batch", "permuted"}


def test_a_function_whose_last_elements_differ_is_found_though_the_batch_fits_one_two_and_four_threads():
    """As torch's silu, whose vectors are 16 numbers on some processors, and end where the share of a thread does."""

    def ends_of_shares(x):
        share = -(-x.numel() // torch.get_num_threads())
        position = torch.arange(x.numel()) % share
        return x + (position >= share // 16 * 16).view(x.shape) * (len(x) > 1)

    rows = normal(NUM_ROWS, 448)
    report = check_batch_invariance(ends_of_shares, rows)
    fixed = {"1 thread", "2 threads", "4 threads"}
    assert outcomes(report, "batch-dependent")
    assert all("threads" in name and name not in fixed for name in outcomes(report, "batch-dependent"))


def test_one_ulp_in_one_row_is_counted_exactly():
    rows = ascending_rows()

    def fn(x):
        up = torch.nextafter(x, torch.full_like(x, math.inf))
        return torch.where((x[:, :1] == 12.0) & (torch.arange(6) == 3) & (len(x) > 1), up, x)

    probe = probe_of(check_batch_invariance(fn, rows), "permuted")
    assert (probe.num_rows, probe.num_different, probe.first_different, probe.max_ulp) == (NUM_ROWS, 1, 11, 1)
    assert probe.max_abs_diff == 2.0**-23 * 2.0 ** math.floor(math.log2(rows[11, 3].item()))
    assert probe.outcome == "rounding"


def test_noise_is_not_repeatable_and_nothing_is_concluded_from_it():
    report = check_batch_invariance(lambda x: x + torch.rand_like(x), ascending_rows())
    assert report.kind == "not repeatable"
    assert outcomes(report, "not repeatable") == {probe.name for probe in report.probes}


def test_noise_that_only_large_batches_have_is_found_too():
    report = check_batch_invariance(lambda x: x + (torch.rand_like(x) if len(x) > 30 else 0), ascending_rows())
    assert report.kind == "not repeatable"
    assert probe_of(report, "each row alone, again").outcome == "equal"


def test_a_rare_change_from_run_to_run_is_found_after_the_first_repetition():
    calls = []

    def fn(x):
        calls.append(len(x))
        return x + (calls.count(NUM_ROWS) == 3) if len(x) == NUM_ROWS else x + 0

    assert probe_of(check_batch_invariance(fn, ascending_rows()), "full batch, again").outcome == "not repeatable"


def test_batch_norm_in_training_depends_on_the_batch_and_does_not_run_on_one_row():
    report = check_batch_invariance(nn.BatchNorm1d(24), normal(NUM_ROWS, 24))
    assert report.kind == "batch-dependent"
    alone = probe_of(report, "each row alone")
    assert alone.outcome == "failed"
    assert "more than 1 value per channel" in alone.note
    assert "chunks of 8" in outcomes(report, "batch-dependent")
    assert check_batch_invariance(nn.BatchNorm1d(24).eval(), normal(NUM_ROWS, 24)).invariant


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_rms_norm_is_invariant_but_for_rows_that_are_stored_as_columns(dtype):
    norm, rows = nn.RMSNorm(512, dtype=dtype), normal(37, 512, dtype=dtype)
    report = check_batch_invariance(norm, rows)
    # torch's own mean over a strided dimension may add in another order: ask it.
    columns_agree = torch.equal(norm(rows.t().contiguous().t()), norm(rows))
    assert outcomes(report, "rounding") == (set() if columns_agree else {"transposed storage"})
    assert outcomes(report, "equal", "rounding") == {probe.name for probe in report.probes}


def test_a_function_may_change_its_input_and_use_its_output_again():
    rows = ascending_rows()
    before, memory = rows.clone(), torch.empty(2 * NUM_ROWS, 6)

    def fn(x):
        return torch.mul(x.mul_(2.0), 3.0, out=memory[: len(x)])

    assert check_batch_invariance(fn, rows).invariant
    assert check_batch_invariance(lambda x: x.mul_(2.0), rows).invariant
    assert torch.equal(rows, before)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: x + torch.zeros(8, 6) if len(x) > 8 else x, "RuntimeError: The size of tensor a"),
        (lambda x: x[:8], "ValueError: the function must return 16 rows for 16 rows, got shape [8, 6]"),
        (lambda x: x if len(x) < 16 else [x], "TypeError: the function must return a tensor, got list"),
        (lambda x: x if len(x) < 16 else x[:, :0], "ValueError: the function must return 16 rows"),
        (
            lambda x: x if len(x) < 16 else x.double(),
            "TypeError: the function returns torch.float32 and torch.float64",
        ),
        (lambda x: x if len(x) in (1, 5) else x.bfloat16(), "TypeError: cannot compare bits of torch.bfloat16"),
        (lambda x: x if len(x) < 16 else x[:, :1], "RuntimeError: Sizes of tensors must match"),
    ],
)
def test_a_probe_that_raises_has_failed_and_the_function_is_not_invariant(fn, message):
    report = check_batch_invariance(fn, ascending_rows())
    assert report.kind == "failed"
    assert not report.invariant
    probe = probe_of(report, "chunks of 16")
    assert probe.outcome == "failed"
    assert message in probe.note
    assert probe_of(report, "chunks of 5").outcome == "equal"


def test_a_failed_probe_hides_no_graver_finding_and_is_hidden_by_no_lesser_one():
    def fails_at_16(fn):
        return lambda x: [] if len(x) == 16 else fn(x)

    rows = normal(18, 64)
    assert check_batch_invariance(fails_at_16(rotated_sum), rows).kind == "failed"
    assert check_batch_invariance(fails_at_16(lambda x: x - x.mean(0)), rows).kind == "batch-dependent"


def test_a_function_that_never_works_passes_nothing():
    report = check_batch_invariance(lambda x: x.no_such_thing, ascending_rows())
    assert report.kind == "failed"
    assert outcomes(report, "failed") == {"each row alone", "full batch"}


@pytest.mark.parametrize("fails", [False, True])
def test_thread_counts_are_tried_and_restored(fails):
    torch.set_num_threads(3)
    seen = set()

    def fn(x):
        seen.add(torch.get_num_threads())
        if fails and torch.get_num_threads() != 3:
            raise RuntimeError("not with these threads")
        return x + 0

    report = check_batch_invariance(fn, ascending_rows())
    assert seen > {1, 2, 3, 4}
    assert max(seen) <= 8
    assert torch.get_num_threads() == 3
    failed = {f"{count} thread{'s' * (count > 1)}" for count in seen - {3}} if fails else set()
    assert outcomes(report, "failed") - {"3 threads"} == failed
    with pytest.raises(KeyboardInterrupt):
        check_batch_invariance(interrupted_with_two_threads, ascending_rows())
    assert torch.get_num_threads() == 3


def interrupted_with_two_threads(x):
    if torch.get_num_threads() == 2:
        raise KeyboardInterrupt
    return x


def test_rows_of_token_ids_are_padded_with_zeros_only():
    embedding, ids = nn.Embedding(50, 64), torch.arange(24).reshape(12, 2)
    report = check_batch_invariance(lambda x: rotated_sum(embedding(x).sum(1)), ids)
    assert report.kind == "rounding"
    assert probe_of(report, "full batch").judged_by == "float64"
    assert {probe.name for probe in report.probes if "before" in probe.name} == {"zeros before"}
    assert check_batch_invariance(lambda x: x - x.sum(0), ids).kind == "batch-dependent"
    assert check_batch_invariance(lambda x: x * 2, ids).invariant


@pytest.mark.parametrize("shape", [(), (0, 4), (1, 4)])
def test_fewer_than_two_rows_are_an_error(shape):
    with pytest.raises(ValueError, match=r"at least 2 rows .* got shape"):
        check_batch_invariance(lambda x: x, torch.zeros(shape))


def test_a_report_without_a_single_comparison_is_no_pass():
    skipped = Probe(name="decode", outcome="not run", note="needs make_decoder")
    for probes in ((), (skipped,)):
        assert InvarianceReport(probes=probes).kind == "failed"
        assert not InvarianceReport(probes=probes).invariant


def test_a_report_can_be_read_and_stored():
    report = check_batch_invariance(triggered(TRIGGERS["permuted"]), ascending_rows())
    first, header, *lines = str(report).splitlines()
    assert first == f"batch-dependent: {len(report.probes) - 1} of {len(report.probes)} probes found equal bits"
    assert header.split()[:4] == ["probe", "outcome", "rows", "differ"]
    (line,) = (line for line in lines if line.startswith("permuted"))
    assert line.split()[1:5] == ["batch-dependent", "36", "36", "0"]
    stored = json.loads(json.dumps(report.to_dict()))
    assert (stored["kind"], stored["invariant"]) == ("batch-dependent", False)
    assert [probe["name"] for probe in stored["probes"]] == [probe.name for probe in report.probes]
