"""Log-probs that real engines gave: the report names their cause, and tells them apart."""

import sys
from pathlib import Path

import pytest
import torch
from trained_plants import sides_of

from mis_ext.dumps import Dumps
from mis_ext.report.whole_report import Report, preset_candidates, report_of

pytest.importorskip("numpy")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from evidence.archives import Archives
from report_evidence import RESULTS, write_dumps

CAUSES = {
    # SGLang 0.5.23 in bfloat16: the same mixture with its own experts and with those of the engine, and a dense model.
    "moe_mismatch_experts": "expert_routing",
    "moe_mismatch_replayed": "bf16_kernels",
    "moe_mismatch_dense": "bf16_kernels",
    "moe": "expert_routing",
    # SGLang 0.5.17 on an H200.
    "bf16": "bf16_kernels",
    "length_bf16": "bf16_kernels",
    # A cache in fp8 of a small model may have the size of a pretrained model's kernels: then both are named.
    "fp8_cache": "bf16_or_low_precision",
    "length_fp8_cache": "low_precision",
    "atlas_cache_e4m3": "bf16_or_low_precision",
    "atlas_cache_e5m2": "low_precision",
    "atlas_deterministic": "bf16_kernels",
    # SmolLM2-135M in bfloat16 on both sides, fresh weights.
    "pretrained_floor_lr1e-06": "bf16_or_low_precision",
    "pretrained_floor_lr3e-06": "bf16_or_low_precision",
    "pretrained_floor_lr1e-05": "bf16_or_low_precision",
    # The same model before training, with other settings of one side.
    "pretrained_atlas_deterministic": "bf16_or_low_precision",
    "pretrained_atlas_fp16": "bf16_kernels",
    "pretrained_atlas_e4m3_cache": "low_precision",
    "pretrained_atlas_e5m2_cache": "low_precision",
    "pretrained_atlas_e4m3_weights": "low_precision",
    "pretrained_atlas_fp8_products": "low_precision",
    "pretrained_atlas_int8_products": "low_precision",
    # Of what was sampled with top-p 0.9, and with the mask on both sides.
    "top_p_sglang_sampled": "top_p_or_top_k",
    "top_p_sglang_kept": "bf16_kernels",
}


def report_on(study: str, folder: Path) -> Report:
    return report_of(Dumps(write_dumps(study, folder)), preset_candidates(["mis", "gated_mis"]))


@pytest.mark.parametrize("study", CAUSES)
def test_the_cause_of_a_measured_mismatch_is_named(study, tmp_path) -> None:
    assert [found.cause for found in report_on(study, tmp_path).diagnoses] == [CAUSES[study]]


def test_what_to_do_differs_between_an_fp8_cache_and_bf16(tmp_path) -> None:
    fp8, bf16 = (report_on(study, tmp_path / study).recommendation for study in ("length_fp8_cache", "length_bf16"))
    assert (fp8.name, bf16.name) == ("mis", "none")
    assert bf16.headline == "No correction is needed."
    (gated,) = (ranked for ranked in fp8.ranking if ranked.name == "gated_mis")
    assert "rejects_much" in gated.traps


def tail_share(difference: torch.Tensor, behavior: torch.Tensor) -> float:
    """Share of the k3 of uncertain tokens in those that differ 4 times as much as is typical."""
    uncertain = behavior.exp() < 0.98
    d, p = difference[uncertain].double(), behavior[uncertain].double().exp()
    size, k3 = d.abs() / (1.0 - p), d.expm1() - d
    return float(k3[size > 4.0 * size.median()].sum() / k3.sum())


def measured_tail(study: str) -> float:
    archives = Archives(RESULTS)
    steps = [
        step for name in archives.names() if name.split("-seed")[0] == study for step in archives.arrays(name).values()
    ]
    mask, *sides = (
        torch.cat([torch.from_numpy(step[name]).flatten() for step in steps])
        for name in ("mask", "log_ratio", "behavior")
    )
    return tail_share(*(side[mask.bool()].float() for side in sides))


def planted_tail(*plants: str) -> float:
    trainer, engine = (torch.cat(side) for side in sides_of(*plants)[:2])
    return tail_share(trainer - engine, engine)


def test_tails_are_no_sign_of_low_precision() -> None:
    # In the model of the tests they look like one.
    bf16, fp8 = planted_tail(), planted_tail("fp8 weights")
    assert bf16 < fp8 < planted_tail("fp8 cache (e5m2)")
    # But in bfloat16 another model has more, and a pretrained one less: in fp8 too.
    pretrained = [measured_tail(f"pretrained_{name}") for name in ("floor_lr1e-06", "atlas_fp8_products")]
    assert pretrained == sorted(pretrained)
    assert pretrained[1] < bf16 < fp8 < measured_tail("bf16")


def test_a_study_that_is_not_there_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match="fp9_cache: no such study"):
        write_dumps("fp9_cache", tmp_path)
