# SPDX-License-Identifier: Apache-2.0
"""Measured log-probs of `lab/evidence` as files that `mis-ext report` reads.

    python lab/studies/report_evidence.py length_fp8_cache dumps/length_fp8_cache
    mis-ext report dumps/length_fp8_cache --out runs/length_fp8_cache

Of conditions whose log-probs are here, of a part of their responses in float16: all seeds, a file per step as slime
writes them. Those of the others are in revision 16a265ec. Runs that replay the engine's experts are a condition of
their own, with `_replayed` behind its name. An unknown name is answered with those there are.
"""

import argparse
from pathlib import Path

import torch
from evidence.archives import Archives

RESULTS = Path(__file__).parents[1] / "evidence" / "results"
REPLAYED = "_replayed"


def write_dumps(study: str, folder: Path) -> list[Path]:
    """The files of a study, one per step.

    Raises:
        ValueError: There is no such study, or it kept nothing.
    """
    archives = Archives(RESULTS)
    engine = study.removesuffix(REPLAYED)
    # A condition may have that ending by itself: moe_mismatch_replayed.
    named = [name for name in archives.names() if name.split("-seed")[0] in (study, engine)]
    groups = [name for name in named if _condition(name, archives) == study]
    sources = [arrays for arrays in map(archives.arrays, groups) if arrays]
    if not sources:
        known = sorted({_condition(name, archives) for name in archives.names() if archives.has_arrays(name)})
        raise ValueError(f"{study}: no such study in {RESULTS} has log-probs; these have: {', '.join(known)}")
    steps: dict[int, list[dict[str, object]]] = {}
    for source in sources:
        for name, streams in sorted(source.items()):
            samples = steps.setdefault(int(name.removeprefix("step")), [])
            # Runs and responses in one row: a run of another seed is another policy, but the same engine.
            flat = [torch.from_numpy(streams[key]).flatten(0, -2) for key in ("behavior", "log_ratio", "mask")]
            for behavior, log_ratio, mask in zip(flat[0].float(), flat[1].float(), flat[2], strict=True):
                samples.append(
                    {
                        "sample_index": len(samples),
                        "response_lengths": len(mask),
                        "loss_masks": mask.int(),
                        "log_probs": behavior + log_ratio,
                        "rollout_log_probs": behavior,
                    }
                )
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{step}.pt" for step in sorted(steps)]
    for path in paths:
        content = {"format_version": 2, "rollout_id": int(path.stem), "samples": steps[int(path.stem)]}
        torch.save(content, path)
    return paths


def _condition(name: str, archives: Archives) -> str:
    """Of a group: its engine, and whether the trainer uses the engine's experts."""
    condition = name.split("-seed")[0]
    replays = any(method.get("replays_routing") for method in archives.head(name)["settings"]["methods"])
    return condition + REPLAYED if replays else condition


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    print(*write_dumps(options.study, options.folder), sep="\n")
