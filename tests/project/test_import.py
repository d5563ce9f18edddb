# SPDX-License-Identifier: Apache-2.0
"""What `import mis_ext` may cost and pull in."""

import ast
import importlib
import pkgutil
import py_compile
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]
HEAVY = ("megatron", "sglang", "transformers", "triton", "matplotlib", "rich", "transformer_engine", "apex", "numpy")


def run(code: str, *, cwd: Path | None = None) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=cwd).stdout


LAZY = ("mis_ext", "mis_ext.onpolicy", "mis_ext.rollout")
PACKAGES = (*LAZY, *(f"mis_ext.{room}" for room in ("tools.diagnosis", "methods", "tools.report")))
each_lazy_package = pytest.mark.parametrize("name", LAZY)


@cache
def lines_of_one_process() -> list[list[str]]:
    """What a process prints after each of three steps, as torch takes longer to import than all of them.

    It calls the hook, whose guards look at these tokens and find nothing, so that the rules of the diagnosis and the
    traps stay where they are; takes modules of a package that loads late; and then every public name, and the check at
    start.
    """
    code = f"""
import argparse, sys, torch, yaml
before = set(sys.modules)
import mis_ext
torch.manual_seed(0)
log_probs = [-3 * torch.rand(90), -3 * torch.rand(40)]
args = argparse.Namespace(**yaml.safe_load(open("yaml/mis.yaml")))
for _ in range(2):
    mis_ext.compute_mis_weights_with_cp(
        args, pg_loss=torch.randn(130), train_log_probs=log_probs,
        rollout_log_probs=[x + 0.01 * torch.randn_like(x) for x in log_probs],
        loss_masks=[torch.ones(90), torch.ones(40)], total_lengths=[92, 42], response_lengths=[90, 40])
ours = ("methods", "tools", "hosts.slime_miles.check_setup")
others = ("megatron", "sglang", "transformers", "triton", *(f"mis_ext.{{name}}" for name in ours))
print(*[name for name in others if name in sys.modules])

import mis_ext.rollout as rollout
print(rollout.canary.__name__, rollout.Canary.__name__)

import mis_ext.tools.cli, {", ".join(PACKAGES)}
for package in map(sys.modules.get, {PACKAGES}):
    for name in package.__all__:
        getattr(package, name)
launch = dict(loss_type="custom_loss", custom_loss_function_path="mis_ext.policy_loss", rank=1, use_tis=True)
mis_ext.check_setup(argparse.Namespace(**launch, advantage_estimator="gspo"))
print(*(set(sys.modules) - before))
"""
    return [line.split() for line in run(code, cwd=REPOSITORY).splitlines()]


def test_the_hook_runs_without_any_framework_and_loads_no_method_and_no_advice() -> None:
    assert lines_of_one_process()[0] == []


def test_a_module_of_a_package_that_loads_late_is_found_as_its_attribute() -> None:
    assert lines_of_one_process()[1] == ["mis_ext.rollout.canary", "Canary"]


def test_no_public_name_pulls_in_a_framework() -> None:
    # torch itself imports numpy where it is installed.
    names = lines_of_one_process()[2]
    imported = {name.split(".")[0] for name in names}
    assert imported.isdisjoint(HEAVY)
    assert "torch._dynamo" not in names
    assert "mis_ext" in imported


def test_importing_the_package_loads_no_room_of_it() -> None:
    code = (
        "import sys, mis_ext; print(*(name for name in sys.modules if name.startswith(('mis_ext', 'torch', 'yaml'))))"
    )
    assert set(run(code).split()) == {"mis_ext", "mis_ext.lazy"}


def test_the_rollout_needs_no_torch_until_it_scores() -> None:
    code = """
import sys, mis_ext.rollout
for name in mis_ext.rollout.__all__:
    if not name.endswith(("LogProbs", "log_probs")) or name == "define_log_probs":
        getattr(mis_ext.rollout, name)
import mis_ext.tools.cli
print("mis_ext.rollout.custom_generate.function" in sys.modules, "torch" in sys.modules)
"""
    assert run(code).split() == ["True", "False"]


def test_the_files_of_presets_are_listed_without_torch() -> None:
    code = """
import sys, mis_ext.tools.cli
mis_ext.tools.cli.main(["presets"])
mis_ext.tools.cli.main(["presets", "mis"])
print("torch" in sys.modules)
"""
    assert run(code).split()[-1] == "False"


def rooms() -> list[str]:
    """In the order of the developers' page."""
    page = (REPOSITORY / "docs" / "developers.md").read_text(encoding="utf-8")
    listed = page.split("## Packages")[1].split("```")[1]
    return [line.split()[0].rstrip("/") for line in listed.strip().splitlines() if line[:1].isalpha()]


def imported_rooms(path: Path) -> set[str]:
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    modules += [
        f"mis_ext.{a.name}" for n in nodes if isinstance(n, ast.ImportFrom) if n.module == "mis_ext" for a in n.names
    ]
    modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    rooms = (module.split(".")[1:3] for module in modules if module.startswith("mis_ext."))
    return {"/".join(room if room[0] == "tools" else room[:1]) for room in rooms}


def test_imports_go_up_the_list_of_rooms_and_methods_use_the_correction_only() -> None:
    order = rooms()
    assert set(order) >= {"correction", "methods", "hosts", "tools/diagnosis", "tools/cli"}
    for at, room in enumerate(order):
        for path in (REPOSITORY / "mis_ext" / room).rglob("*.py"):
            below = imported_rooms(path) & set(order[at + 1 :])
            assert not below, f"{path} imports {below}"
            if room == "methods":
                assert imported_rooms(path) & set(order) <= {"correction", "methods"}, path


def test_nothing_but_the_lab_imports_the_lab() -> None:
    folders = ("benchmarks", "studies", "hosts", "real_stack", "tests")
    lab = {path.stem for folder in folders for path in _modules(folder)}
    outside = [
        path
        for pattern in ("mis_ext/**/*.py", "examples/**/*.py", "tests/**/*.py")
        for path in REPOSITORY.glob(pattern)
    ]
    assert lab >= {"bench_correction", "evidence", "host_cpu", "slime_gpu", "stand_in"}
    assert [str(path) for path in outside if imported_names(path) & {"lab", *lab}] == []


def _modules(folder: str) -> list[Path]:
    here = REPOSITORY / "lab" / folder
    return [*here.glob("*.py"), *(path.parent for path in here.glob("*/__init__.py"))]


def imported_names(path: Path) -> set[str]:
    # One import a line, as the linter wants it: parsing all of these files takes seconds.
    return {*re.findall(r"^ *(?:from|import) (\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)}


def documented_paths() -> list[str]:
    """Every function that a flag of a host names in the documentation."""
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    flag = re.compile(r"--[a-z-]+-path`?[ |]+`?([\w/]+(?:\.\w+)+)")
    found = {path for page in pages for path in flag.findall(page.read_text(encoding="utf-8"))}
    # The last two are found in the folder of the examples.
    scripts = ("dump_rollout.save", "record_loss_call.record")
    return sorted(path for path in found if not path.endswith(".yaml") and path not in scripts)


def test_the_documentation_names_no_function_outside_of_the_package() -> None:
    # A host finds its own package of the same name first: slime and Megatron-LM both have `examples`.
    assert {path.split(".")[0] for path in documented_paths()} == {"mis_ext"}
    assert {"mis_ext.log_mismatch", "mis_ext.prepare_rollout", "mis_ext.policy_loss"} <= {*documented_paths()}


def test_hosts_find_each_function_by_its_path() -> None:
    for path in documented_paths():
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(module), name).__name__ == name


def imports_for_type_checkers(package: ModuleType) -> dict[str, str]:
    """Which module the source of a package imports each name from."""
    tree = ast.parse(Path(package.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {alias.name: node.module for node in block.body for alias in node.names}


@each_lazy_package
def test_names_that_load_late_are_those_that_type_checkers_see(name) -> None:
    package = importlib.import_module(name)
    seen = imports_for_type_checkers(package)
    assert sorted(seen) == sorted(package.__all__)
    assert set(package.__all__) <= set(dir(package))
    for public, module in seen.items():
        assert getattr(package, public) is getattr(importlib.import_module(module), public)
        assert public in vars(package)
    with pytest.raises(AttributeError, match=f"module '{name}' has no attribute 'rekord'"):
        _ = package.rekord


def test_without_its_source_the_package_says_what_is_missing(tmp_path: Path) -> None:
    copy = tmp_path / "mis_ext"
    copy.mkdir()
    for module in ("__init__", "lazy"):
        py_compile.compile(
            str(REPOSITORY / "mis_ext" / f"{module}.py"), cfile=str(copy / f"{module}.pyc"), doraise=True
        )
    left = subprocess.run(
        [sys.executable, "-c", "import mis_ext"], cwd=tmp_path, env={}, capture_output=True, text=True
    )
    assert "ImportError: mis_ext reads its names" in left.stderr
    assert "install it with its .py files" in left.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_no_module_takes_the_place_of_a_public_name(name) -> None:
    # A package gets each of its modules as an attribute, the moment that it is imported.
    public = set(importlib.import_module(name).__all__)
    modules = {module.name for module in pkgutil.iter_modules(importlib.import_module(name).__path__)}
    assert public.isdisjoint(modules)


@pytest.mark.slow
@pytest.mark.whole_run
def test_a_wheel_of_the_source_distribution_holds_every_module_and_the_presets(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    # Of a copy: setuptools also packs what an earlier build of the checkout has listed.
    copy = tmp_path / "copy"
    left_out = shutil.ignore_patterns(".*", "*.egg-info", "site", "runs", "lab", "tests", "__pycache__")
    shutil.copytree(REPOSITORY, copy, symlinks=True, ignore=left_out)
    subprocess.run([sys.executable, "-c", build, str(tmp_path)], check=True, capture_output=True, cwd=copy)
    (source,) = tmp_path.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    pip += ["--no-build-isolation", "--no-compile"]
    tmp_path = tmp_path / "installed"
    subprocess.run([*pip, "--target", str(tmp_path), str(source)], check=True, capture_output=True)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import mis_ext
print(mis_ext.__file__, mis_ext.__version__, *mis_ext.list_presets())
"""
    where, version, *presets = run(code).split()
    assert where.startswith(str(tmp_path))
    assert f"-{version}.tar.gz" in source.name
    assert "mis" in presets
    # Every preset names it as a file beside it.
    assert (tmp_path / "mis_ext" / "_presets" / "mis.schema.json").is_file()
    modules, installed = (
        {path.relative_to(root) for path in (root / "mis_ext").rglob("*.py")} for root in (REPOSITORY, tmp_path)
    )
    assert modules <= installed
    (script,) = (tmp_path / "bin").iterdir()
    assert script.name == "mis-ext"


def test_no_message_names_a_file_of_the_repository() -> None:
    """Who has installed the wheel does not have it."""
    for path in (REPOSITORY / "mis_ext").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node.value for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
        named = [text for text in texts if re.search(r"\b(docs|examples|lab|tests|yaml)/|\.md\b", str(text))]
        assert not named, (path, named)
