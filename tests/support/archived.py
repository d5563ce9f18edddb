# SPDX-License-Identifier: Apache-2.0
"""Files of tests that lie in an archive."""

import tarfile
from pathlib import Path


def unpacked(archive: Path, folder: Path) -> Path:
    """The folder with the content of the archive. The filter is the default in Python 3.14, and exists since 3.11.4."""
    with tarfile.open(archive) as opened:
        opened.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return folder
