"""Golden results: what the hook gave before a change, so that the same can be asked of it afterwards.

    python tests/golden/record.py --check [--backend eager] [--only SUBSTRING] [--device cuda]
    python tests/golden/record.py --record [--metrics-only]

Cases are every preset and the configurations that no preset covers, times layouts (context and data parallelism in
threads), times kinds of data (poison among them), times the hosts' two reducers: see ``golden_grid``. Everything goes
through ``mis_ext.compute_mis_weights_with_cp``. A case holds each rank's loss, its gradient and masks, and every metric
as the hosts plot it: reduced with the original masks, added up over context-parallel ranks.

Metrics may differ by 1e-6 of their value plus 1e-7, all else of the Triton backend too. Loss, gradient and masks of the
eager backend must have the recorded bits on the machine that recorded them; elsewhere `exp` has other bits, and the
tolerance holds. Metrics that are new are not looked at; one that is gone is a difference.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import defaultdict

import torch
from golden_grid import cases
from golden_store import Difference, Record, compute, differences, is_wrong, machine

import mis_ext

BACKENDS = ("eager", "triton")


def main() -> int:
    """Check or record the chosen backends, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="compare with the record; exit code 1 if it differs")
    action.add_argument("--record", action="store_true", help="write the record")
    parser.add_argument("--metrics-only", action="store_true", help="record metrics, keep the recorded loss and masks")
    parser.add_argument("--backend", choices=BACKENDS, help="default: both")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--device", default="cpu", help="where the tensors are while the hook runs")
    options = parser.parse_args()
    if options.record and (options.only or options.device != "cpu"):
        parser.error("a record holds all cases, from the CPU")
    if options.metrics_only and not options.record:
        parser.error("--metrics-only goes with --record")
    if options.backend is None:
        command = [sys.executable, __file__, *sys.argv[1:], "--backend"]
        codes = [subprocess.run([*command, backend], check=False).returncode for backend in BACKENDS]
        return int(any(codes))
    os.environ["MIS_EXT_BACKEND"] = options.backend
    if options.backend == "triton" and options.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    print(f"# {options.backend}: {mis_ext.__file__}", flush=True)
    if options.record:
        return _record(options.backend, keep=Record.load(options.backend) if options.metrics_only else None)
    return _check(options.backend, options.only, options.device)


def _record(backend: str, *, keep: Record | None) -> int:
    record, start = Record(backend), time.monotonic()
    for case in cases(backend):
        result, pg_loss = compute(case)
        if keep is not None:
            record.machine = keep.machine
            result = keep.get(case, pg_loss)._replace(metrics=result.metrics)
        record.add(case, result, pg_loss)
    record.save()
    print(f"{len(record.cases)} cases, {record.path.stat().st_size:,} bytes, {time.monotonic() - start:.0f} s")
    return 0


def _check(backend: str, only: str, device: str) -> int:
    record = Record.load(backend)
    chosen = [case for case in cases(backend) if only in case.name]
    if only == "" and {case.name for case in chosen} != set(record.cases):
        raise ValueError("the grid is not that of the record")
    needs_bits = backend == "eager" and device == "cpu" and record.machine == machine()
    found, raised, new = defaultdict(list), [], set()
    for case in chosen:
        try:
            actual, pg_loss = compute(case, device=device)
        except Exception as error:
            raised.append(f"{case.name}: {type(error).__name__}: {error}")
            continue
        expected = record.get(case, pg_loss)
        new |= set(actual.metrics) - set(expected.metrics)
        for difference in differences(case, actual, expected):
            found[difference.quantity].append(difference)
    return _report(found, raised, new, num_cases=len(chosen), needs_bits=needs_bits)


def _report(
    found: dict[str, list[Difference]], raised: list[str], new: set[str], *, num_cases: int, needs_bits: bool
) -> int:
    by_case = defaultdict(list)
    for difference in (difference for of_quantity in found.values() for difference in of_quantity):
        by_case[difference.case].append(difference)
    wrong = {name: [item for item in items if is_wrong(item, needs_bits=needs_bits)] for name, items in by_case.items()}
    wrong = {name: items for name, items in wrong.items() if items}
    exact = sum(all(item.is_exact for item in items) for items in by_case.values())
    only_lost = sum(all(item.is_lost and item.error <= 1.0 for item in items) for items in wrong.values())
    print(f"{num_cases} cases: {exact} exact, {len(wrong)} wrong, {only_lost} of them NaN only, {len(raised)} raised")
    print(f"required of loss and gradient: {'the same bits' if needs_bits else 'error 1'}")
    print("error 1: 1e-6 * value + 1e-7; NaN: cases with a number that is NaN today, apart from wrong ones\n")
    print(f"{'quantity':44} {'cases':>5} {'exact':>5} {'wrong':>5} {'NaN':>5} {'error':>9}  worst case")
    for quantity, items in found.items():
        print(_row(quantity, items, needs_bits=needs_bits))
    worst_first = sorted(wrong, key=lambda name: -max(item.error for item in wrong[name]))
    _print_list("wrong", [f"{name}: {_shortened([item.quantity for item in wrong[name]])}" for name in worst_first])
    _print_list("raised", raised)
    _print_list("not in the record", sorted(new))
    return int(bool(wrong or raised))


def _row(quantity: str, items: list[Difference], *, needs_bits: bool) -> str:
    exact = sum(item.is_exact for item in items)
    lost = sum(item.is_lost for item in items)
    wrong = sum(is_wrong(item._replace(is_lost=False), needs_bits=needs_bits) for item in items)
    worst = max(items, key=lambda item: (item.error, item.is_lost, not item.is_exact))
    where = "" if worst.is_exact else f"{worst.case}: {worst.example}"
    return f"{quantity:44} {len(items):5} {exact:5} {wrong:5} {lost:5} {worst.error:9.3g}  {where}"


def _print_list(title: str, lines: list[str]) -> None:
    if lines:
        more = [f"... and {len(lines) - 20} more"] if len(lines) > 20 else []
        print(f"\n{title}:", *lines[:20], *more, sep="\n  ")


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


if __name__ == "__main__":
    sys.exit(main())
