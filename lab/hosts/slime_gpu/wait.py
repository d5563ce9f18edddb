# SPDX-License-Identifier: Apache-2.0
"""Waits for an engine: ``python -m slime_gpu.wait URL PROCESS_ID LOG``. Fails when its process has ended."""

import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

SECONDS = 1200
LINES_OF_LOG = 20


def answers(url: str) -> bool:
    """Whether the server is up."""
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def runs(process_id: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def main() -> None:
    """Return when the engine answers, else end with the last lines of its log."""
    url, process_id, log = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    start = time.monotonic()
    while not answers(url):
        seconds = time.monotonic() - start
        if not runs(process_id) or seconds > SECONDS:
            lines = log.read_text(errors="replace").splitlines()[-LINES_OF_LOG:]
            what = "ended" if seconds <= SECONDS else f"does not answer after {SECONDS} s"
            sys.exit(os.linesep.join([*lines, f"the engine {what}: {log}"]))
        time.sleep(1)
    print(f"engine up after {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
