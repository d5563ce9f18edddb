# SPDX-License-Identifier: Apache-2.0
"""The README as the package index shows it: there a relative link leads nowhere, and a picture is missing.

Once ``[project.urls]`` of pyproject.toml has a ``Repository``, links and pictures start there; all else stands in
pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
RELATIVE = re.compile(r"""(?P<before>\]\(|(?:src|href)=")(?!https?:|mailto:|\#)(?P<path>[^)"\s]+)""")
PICTURES = (".png", ".svg")


def with_absolute_links(text: str, repository: str) -> str:
    """Markdown whose relative links start at a repository on GitHub."""

    def absolute(found: re.Match[str]) -> str:
        kind = "raw" if found["path"].endswith(PICTURES) else "blob"
        return f"{found['before']}{repository}/{kind}/HEAD/{found['path']}"

    return RELATIVE.sub(absolute, text)


project = (HERE / "pyproject.toml").read_text(encoding="utf-8")
address = re.search(r'^Repository = "(https://.+?)/?"$', project, re.MULTILINE)
readme = (HERE / "README.md").read_text(encoding="utf-8")
setup(
    long_description=with_absolute_links(readme, address[1]) if address else readme,
    long_description_content_type="text/markdown",
)
