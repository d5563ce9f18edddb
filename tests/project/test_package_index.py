# SPDX-License-Identifier: Apache-2.0
"""What the package index shows: the README, with links that lead somewhere once the project has an address."""

import re
import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path

import pytest

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).parents[2]
# What stays as it is: links to elsewhere, and within the page.
STAYS = ("https://pytorch.org/", "mailto:someone@example.org", "#install")
README = (ROOT / "README.md").read_text(encoding="utf-8") + "".join(f"[x]({each})\n" for each in STAYS)
ADDRESS = "https://github.com/someone/mis_ext"
URLS = re.compile(r"^\[project\.urls\]\n(?:(?!\[).*\n)*", re.MULTILINE)
TARGET = re.compile(r'\]\(([^)]+)\)|src="([^"]+)"')


def long_description(folder: Path, urls: str) -> str:
    """Of the metadata that the build makes, where pyproject.toml has these ``urls``."""
    for name in ("LICENSE", "setup.py"):
        shutil.copy(ROOT / name, folder)
    (folder / "README.md").write_text(README, encoding="utf-8")
    (folder / "mis_ext").mkdir()
    shutil.copy(ROOT / "mis_ext" / "__init__.py", folder / "mis_ext")
    project = URLS.sub("", (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (folder / "pyproject.toml").write_text(project + urls)
    build = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('.')"
    subprocess.run([sys.executable, "-c", build], check=True, capture_output=True, cwd=folder)
    (path,) = folder.glob("*.dist-info/METADATA")
    metadata = message_from_bytes(path.read_bytes())
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Name"] == "mis_ext"
    return metadata.get_payload(decode=True).decode()


def targets(text: str) -> list[str]:
    return [first or second for first, second in TARGET.findall(text)]


def test_without_an_address_it_is_the_readme(tmp_path) -> None:
    assert long_description(tmp_path, "").strip() == README.strip()


def test_with_an_address_every_link_and_picture_starts_there(tmp_path) -> None:
    found = long_description(tmp_path, f'\n[project.urls]\nRepository = "{ADDRESS}/"\n')
    before, after = targets(README), targets(found)
    assert any(each.endswith(".svg") for each in before)
    assert any("#" in each for each in before)
    for old, new in zip(before, after, strict=True):
        if old in STAYS:
            assert new == old
            continue
        kind = "raw" if old.endswith((".png", ".svg")) else "blob"
        assert new == f"{ADDRESS}/{kind}/HEAD/{old}"
        assert (ROOT / old.partition("#")[0]).exists()
    assert TARGET.sub("", found).strip() == TARGET.sub("", README).strip()
