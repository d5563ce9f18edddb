# SPDX-License-Identifier: Apache-2.0
"""The launch flags of our pages, and whether a host's own parser takes them. The pages are the only list."""

import re
import runpy
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGES = ("README.md", "docs/**/*.md")
# Programs of this repository, whose options the pages name too. Not examples/grpo: its options have the frameworks'
# names.
OWN_SOURCES = ("mis_ext/**/*.py", "examples/*.py", "examples/o*/*.py", "examples/t*/*.py", "lab/**/*.py")
OWN_SOURCES += ("docs/*.py", "tests/**/*.py")
_LAUNCH = re.compile(r"^```\n((?:--.*\n)+)```$", re.MULTILINE)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
_ADDED = re.compile(r"""add_argument\(\s*((?:["']-[^"']+["'],?\s*)+)""")

# Named on the pages, but defined by another program.
ELSEWHERE = {
    "--algo": "OpenRLHF",
    "--cfg": "Hydra",
    "--custom-": "how several of the hosts' begin",
    "--custom-tis-function-pth": "misspelt, to say what happens then",
    "--enable-return-routed-experts": "SGLang",
    "--enable-scale-out": "vLLM",
    "--external": "ms-swift, up to its underscore",
    "--generation-config": "vLLM",
    "--logprobs-mode": "vLLM",
    "--lora-rank": "Miles, vime",
    "--no-deps": "pip",
    "--nproc-per-node": "torchrun",
    "--observe-training-entropy": "Miles",
    "--pause-generation-mode": "Miles",
    "--qkv-format": "Miles",
    "--request-b": "mis-ext diff, which makes the name in a loop",
    "--return-sampling-mask": "vLLM",
    "--rollout": "ms-swift, up to its underscore",
    "--skip-actor-forward-only": "Miles",
    "--true-on-policy-mode": "Miles",
    "--use-miles-router": "Miles",
    "--use-prometheus": "Miles",
    "--use-score-centering": "vime, Miles",
}


@dataclass(frozen=True)
class Launch:
    """One block of launch flags: ``README.md:51`` and its words."""

    where: str
    words: list[str]


def launches(root: Path) -> list[Launch]:
    """Every block of the pages that has launch flags and nothing else."""
    return [
        Launch(_where(page, root, block.start()), shlex.split(block[1], comments=True))
        for page in _pages(root)
        for block in _LAUNCH.finditer(page.read_text(encoding="utf-8"))
    ]


def made_launches(root: Path) -> list[Launch]:
    """The output of ``examples/launch_flags.py`` for each file in ``yaml/``."""
    launch_flags = runpy.run_path(str(root / "examples" / "launch_flags.py"))["launch_flags"]
    return [
        Launch(f"examples/launch_flags.py {path.relative_to(root)}", launch_flags(path))
        for path in sorted((root / "yaml").glob("*.yaml"))
    ]


def located(word: str, *, root: Path, own: Path) -> str:
    """Return a word of a page for a parser that opens the file it names; ``own`` stands for the user's ``my.yaml``."""
    if word == "my.yaml":
        return str(own)
    path = word.removeprefix("$HOME/mis_ext/")
    return str(root / path) if path.startswith("yaml/") else word


def named_flags(root: Path) -> dict[str, str]:
    """Every flag that the pages name and no program of ours has: the flag, and where it is first."""
    own = {
        flag
        for pattern in OWN_SOURCES
        for source in root.glob(pattern)
        for options in _ADDED.findall(source.read_text(encoding="utf-8"))
        for flag in _FLAG.findall(options)
    }
    found: dict[str, str] = {}
    for page in _pages(root):
        for flag in _FLAG.finditer(page.read_text(encoding="utf-8")):
            if flag[0] not in own | ELSEWHERE.keys():
                found.setdefault(flag[0], _where(page, root, flag.start()))
    return found


def faults(documented: list[Launch], answers: list[dict[str, Any]], *, host: str) -> list[str]:
    """Words of the launches that a framework's parser would drop, or read as something else.

    Args:
        documented: Launches of the pages.
        answers: What `host_cpu.parse` wrote for each of them.
        host: Its name, for the messages.
    """
    found = []
    for launch, answer in zip(documented, answers, strict=True):
        found += [f"{launch.where}: {host} drops {flag} without a word" for flag in answer["dropped"]]
        for flag, value in zip(launch.words, [*launch.words[1:], "--"], strict=True):
            if not flag.startswith("--") or flag in answer["dropped"]:
                continue
            expected = repr(True) if value.startswith("--") else repr(value)
            # Paths were made absolute for the parser.
            if answer["read"][flag] != expected and not value.endswith(".yaml"):
                found.append(f"{launch.where}: {flag} {value}: {host} reads {answer['read'][flag]}")
    return found


def unknown(named: dict[str, str], options: Iterable[str]) -> list[str]:
    """Flags of the pages that are not options of slime, and flags of `ELSEWHERE` that are."""
    known = set(options)
    found = [f"{where}: {flag} is no option of slime" for flag, where in named.items() if flag not in known]
    return found + [
        f"{flag} is an option of slime, not of: {whose}" for flag, whose in ELSEWHERE.items() if flag in known
    ]


def _pages(root: Path) -> list[Path]:
    return [page for pattern in PAGES for page in sorted(root.glob(pattern))]


def _where(page: Path, root: Path, start: int) -> str:
    line = page.read_text(encoding="utf-8")[:start].count("\n") + 1
    return f"{page.relative_to(root)}:{line}"
