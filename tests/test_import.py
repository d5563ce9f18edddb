"""What `import mis_ext` may cost and pull in."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
HEAVY = ("megatron", "sglang", "transformers", "triton", "matplotlib", "rich", "transformer_engine", "apex", "numpy")


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_pulls_in_no_framework() -> None:
    # torch itself imports numpy where it is installed.
    imports = "import mis_ext, mis_ext.onpolicy, mis_ext.rollout, mis_ext.cli"
    code = f"import torch, sys; before = set(sys.modules); {imports}; print(*(set(sys.modules) - before))"
    imported = {name.split(".")[0] for name in run(code).split()}
    assert imported.isdisjoint(HEAVY)
    assert "mis_ext" in imported


def test_the_hook_runs_without_any_framework() -> None:
    code = """
import argparse, sys, torch, mis_ext
log_probs = [torch.randn(9) - 2.0, torch.randn(4) - 2.0]
mis_ext.compute_mis_weights_with_cp(
    argparse.Namespace(use_tis=True), pg_loss=torch.randn(13), train_log_probs=log_probs,
    rollout_log_probs=[x + 0.01 for x in log_probs], loss_masks=[torch.ones(9), torch.ones(4)],
    total_lengths=[11, 6], response_lengths=[9, 4])
print(*[name for name in ("megatron", "sglang", "transformers", "triton") if name in sys.modules])
"""
    assert run(code).split() == []


@pytest.mark.slow
def test_an_installed_wheel_holds_the_presets(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*pip, "--target", str(tmp_path), str(REPOSITORY)], check=True, capture_output=True)
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import mis_ext, mis_ext.cli, mis_ext.onpolicy.batch_invariant, mis_ext.rollout
print(mis_ext.__file__, *mis_ext.list_presets())
"""
    where, *presets = run(code).split()
    assert where.startswith(str(tmp_path))
    assert "mis" in presets
    (script,) = (tmp_path / "bin").iterdir()
    assert script.name == "mis-ext"
