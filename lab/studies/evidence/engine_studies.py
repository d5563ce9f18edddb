# SPDX-License-Identifier: Apache-2.0
"""Studies of SGLang's settings: what mismatch they have, and what training with 8-bit products needs."""

from __future__ import annotations

from dataclasses import replace

from .engines import EngineSpec
from .group import Group
from .study import MAIN, MORE_SEEDS, NONE, SEEDS, Study, by_seeds

_SGLANG = EngineSpec(kind="sglang")
_SETTINGS = {
    "bf16": _SGLANG,
    "fp8_products": replace(_SGLANG, weights="fp8_blocks"),
    "int8_products": replace(_SGLANG, weights="int8_blocks"),
    "cache_e4m3": replace(_SGLANG, cache="fp8_e4m3"),
    "cache_e5m2": replace(_SGLANG, cache="fp8_e5m2"),
    # What may fail comes last.
    "deterministic": replace(_SGLANG, settings={"enable_deterministic_inference": True}),
}
# SGLang 0.5.17 has no RMSNorm in float32 on CUDA.
_CONTROLLED_SETTINGS = {**_SETTINGS, "float32": replace(_SGLANG, dtype="float32")}


def _of(name: str, engine: EngineSpec, **changes: object) -> Group:
    """Two seeds of a short training."""
    size = {"seeds": (1, 2), "num_steps": 20, "num_prompts": 64, "dump_steps": (0, 19)}
    return Group(name=name, engine=engine, methods=(NONE,), **{**size, **changes})  # type: ignore[arg-type]


_ATLAS = Study(
    name="atlas",
    question="Which mismatch does each setting of SGLang have against a float32 trainer?",
    groups=tuple(_of(f"atlas_{name}", engine) for name, engine in _SETTINGS.items()),
)
_ATLAS_CONTROLLED = Study(
    name="atlas_controlled",
    question="The same settings in the controlled engine, whose 8-bit products are computed in float32.",
    groups=tuple(
        _of(f"atlas_controlled_{name}", replace(engine, kind="controlled"), num_prompts=8, num_steps=2, dump_steps=(0,))
        for name, engine in _CONTROLLED_SETTINGS.items()
        if not engine.settings
    ),
)


def _products(kind: str) -> tuple[Study, Study]:
    question = f"What do corrections do when the engine multiplies in {kind} (weights in blocks, activations too)?"
    group = Group(
        name=f"{kind}_products",
        engine=_SETTINGS[f"{kind}_products"],
        methods=MAIN,
        seeds=SEEDS,
        num_prompts=64,
        dump_steps=(0, 30, 60, 119),
    )
    controlled = replace(
        group,
        name=f"{kind}_products_controlled",
        engine=replace(group.engine, kind="controlled"),
        seeds=MORE_SEEDS,
        num_prompts=32,
        dump_steps=(),
    )
    return (
        Study(name=group.name, question=question, groups=by_seeds(group, 1)),
        Study(name=controlled.name, question=question, groups=by_seeds(controlled, 4)),
    )


ENGINE_STUDIES = (_ATLAS, _ATLAS_CONTROLLED, *_products("fp8"), *_products("int8"))
