# SPDX-License-Identifier: Apache-2.0
"""Print the flags that a framework's ``train.py`` needs for a configuration file, as one shell line.

    python3 examples/launch_flags.py yaml/mis.yaml

A file with a correction needs ``--use-tis``; a file that only measures needs ``--get-mismatch-metrics``. If the
framework would not call mis_ext with the file, or would get no result from it, the exit code is 2.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import yaml

import mis_ext

FUNCTION = "mis_ext.compute_mis_weights_with_cp"


def launch_flags(path: Path) -> list[str]:
    """Return the flags with which the framework calls mis_ext according to the file at ``path``.

    Raises:
        ValueError: If nothing would be corrected or measured, or the file is not a legal configuration.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: {error}") from None
    config = mis_ext.load_config(path)
    switch = "get_mismatch_metrics" if config.metrics_only else "use_tis"
    # slime and Miles set every key of the file on their arguments, after reading the flags.
    at_run = {switch: True, "custom_tis_function_path": FUNCTION} | content
    if at_run["custom_tis_function_path"] != FUNCTION:
        raise ValueError(f"{path}: custom_tis_function_path is not {FUNCTION}: remove the key")
    if not (at_run.get("use_tis") or at_run.get("get_mismatch_metrics")):
        raise ValueError(f"{path}: nothing would be corrected or measured, because of {switch}: {at_run[switch]}")
    if config.metrics_only and not config.metric_names:
        raise ValueError(f"{path}: nothing would be measured: use_tis is false and mis_metrics names no metric")
    flag = "--" + switch.replace("_", "-")
    return [flag, "--custom-tis-function-path", FUNCTION, "--custom-config-path", str(path.resolve())]


def main() -> None:
    """Print the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, help="YAML file")
    try:
        print(shlex.join(launch_flags(parser.parse_args().config)))
    except (OSError, TypeError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
