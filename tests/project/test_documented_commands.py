# SPDX-License-Identifier: Apache-2.0
"""Every command line of the pages is one that its program takes: files are there, and its parser accepts the rest."""

import argparse
import ast
import re
import shlex
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import yaml
from rows import for_each
from test_documentation import PAGES, ROOT

import mis_ext.tools.cli
from mis_ext.tools.cli.command import Result

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

MEASUREMENTS = (
    ROOT / "lab" / "README.md",
    ROOT / "lab" / "MODELS.md",
    *sorted((ROOT / "lab" / "evidence").glob("*.md")),
)
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`((?:[A-Z_]+=\S+ )*(?:bash|python3?|mis-ext|torchrun|pip|pytest)[ \n][^`]+)`(?!`)")
ASSIGNMENT = re.compile(r"[A-Z_]+=")
PLACEHOLDERS = {"NAME": "gspo", "PRESET": "icepop", "STUDY": "fp8_cache"}


def commands() -> list[tuple[str, str]]:
    """Of the blocks and of the text: page with line, and the command."""
    found = {}
    for page in (*PAGES, *MEASUREMENTS):
        text = page.read_text(encoding="utf-8")
        for block in BLOCK.finditer(text):
            for line in block[1].replace("\\\n", " ").splitlines():
                found.setdefault(line, (page, block.start()))
        for inline in INLINE.finditer(text):
            found.setdefault(" ".join(inline[1].split()), (page, inline.start()))
    return [
        (f"{page.relative_to(ROOT)}:{page.read_text()[:start].count(chr(10)) + 1}", line)
        for line, (page, start) in found.items()
        if shlex.split(line, comments=True)
    ]


@pytest.fixture
def only_parsing(monkeypatch) -> None:
    """`mis-ext` ends where it has parsed its arguments."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_do_nothing(self, args=None, namespace=None):
        parsed, unknown = parse(self, args, namespace)
        parsed.run = lambda _: Result({}, lambda: None)
        return parsed, unknown

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_do_nothing)


@pytest.mark.usefixtures("only_parsing")
@for_each("place, line", commands())
def test_a_documented_command_is_one_that_its_program_takes(place, line) -> None:
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    # What follows is the shell's.
    words = [*takewhile(lambda word: word not in (">", "|"), words)]
    while ASSIGNMENT.match(words[0]):
        words.pop(0)
    CHECKS[words[0]](words[1:])


def check_bash(words: list[str]) -> None:
    script, *arguments = words
    assert (ROOT / script).is_file()
    if script == "tests/run.sh":
        check_pytest(arguments)
    elif script == "docs/run.sh":
        assert arguments in ([], ["serve"])
    elif script.endswith("_cpu.sh"):
        (host,) = re.findall(r"-m host_cpu\.run (\w+)", (ROOT / script).read_text())
        check_script("lab/hosts/host_cpu/run.py", [host, *arguments])
    elif script.endswith("_gpu.sh"):
        # What follows goes to the host.
        assert not arguments
    elif script.startswith(("examples/slime/", "examples/miles/")):
        assert (ROOT / arguments[0]).is_file()
    elif script == ".ci/run":
        assert not arguments
    elif script.startswith("lab/real_stack/"):
        check_usage(ROOT / script, arguments)
    else:
        python = re.findall(r"(?:examples|lab)/[\w/]+\.py", (ROOT / script).read_text())
        check_script(python[-1], arguments)


def check_usage(script: Path, arguments: list[str]) -> None:
    """By a line of the script's own head, in which words with a capital stand for others."""
    usages = re.findall(rf"^#   \S*{re.escape(script.name)} ([^#\n]*)", script.read_text(), flags=re.MULTILINE)
    assert any(
        len(usage.split()) == len(arguments)
        and all(word[0].isupper() or word == given for word, given in zip(usage.split(), arguments, strict=True))
        for usage in usages
    )


def check_python(words: list[str]) -> None:
    if words[:2] == ["-m", "mis_ext"]:
        check_mis_ext(words[2:])
    elif words[:2] == ["-m", "pytest"]:
        check_pytest(words[2:])
    else:
        check_script(words[0], words[1:])


def check_script(script: str, arguments: list[str]) -> None:
    path = ROOT / script
    assert path.is_file()
    for word in arguments:
        # A script would complain of it only later.
        assert not word.startswith("yaml/") or (ROOT / word).is_file()
    package = path.with_name("grpo") / "arguments.py"
    parser_of(package if script == "examples/train_grpo.py" else path).parse_args(arguments)


def parser_of(path: Path) -> argparse.ArgumentParser:
    """What the `add_argument` calls of a program say in literals; to import it would take seconds."""
    parser = argparse.ArgumentParser()
    for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", None) != "add_argument":
            continue
        said = {word.arg: word.value for word in call.keywords if word.arg in ("action", "nargs", "choices")}
        literals = (ast.Constant, ast.List, ast.Tuple)
        options = {name: ast.literal_eval(value) for name, value in said.items() if isinstance(value, literals)}
        if options.get("action") == "store_const":
            # Python 3.10 wants it.
            options["const"] = None
        parser.add_argument(*map(ast.literal_eval, call.args), **options)
    return parser


def check_mis_ext(words: list[str]) -> None:
    if len(words) == 1 and words not in (["methods"], ["presets"]):
        # The text names the command.
        with pytest.raises(SystemExit, match="0"):
            mis_ext.tools.cli.main([*words, "--help"])
    else:
        assert mis_ext.tools.cli.main(words) == 0


def check_pytest(words: list[str]) -> None:
    markers = [line.split(":")[0] for line in project()["tool"]["pytest"]["ini_options"]["markers"]]
    for index, word in enumerate(words):
        if word == "-m":
            assert words[index + 1] in markers
        if word.endswith(".py"):
            assert (ROOT / word).is_file()


def check_pip(words: list[str]) -> None:
    extras = set(re.findall(r"\[(.*)\]", " ".join(words)))
    known = project()["project"]["optional-dependencies"]
    assert {name for names in extras for name in names.split(",")} <= known.keys()


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


CHECKS = {
    "bash": check_bash,
    "python": check_python,
    "python3": check_python,
    "mis-ext": check_mis_ext,
    "pip": check_pip,
    "pytest": check_pytest,
}


def test_every_page_of_the_navigation_and_every_launch_line_is_there() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["site_name"] == "mis_ext"
    flags = [line for page in PAGES for line in re.findall(r"^--[a-z].*$", page.read_text(), flags=re.MULTILINE)]
    options = dict.fromkeys(tuple(line.split()) for line in flags)
    for option, *values in options:
        if option == "--custom-config-path":
            # Absolute: the frameworks start in a checkout of their own, where a relative path leads nowhere.
            checkout, _, path = values[0].partition("/mis_ext/")
            assert checkout == "$HOME"
            assert (ROOT / path).is_file()
        if option.endswith("-function-path"):
            module, _, name = values[0].rpartition(".")
            assert hasattr(__import__(module, fromlist=[name]), name)
    assert len(options) >= 6


def test_ci_deselects_tests_that_exist() -> None:
    names = re.findall(r"--deselect \S+::(\w+)", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_sglang_*.py"))
    assert names
    assert [name for name in names if f"def {name}(" not in tests] == []
