# SPDX-License-Identifier: Apache-2.0
"""What is studied: questions, and the groups of runs that answer them."""

from __future__ import annotations

from dataclasses import replace

from .engine_studies import ENGINE_STUDIES
from .engines import EngineSpec
from .group import Group, Method
from .policy import Shape
from .policy_studies import POLICY_STUDIES
from .study import FEW, FILTERS, GATE, NONE, SEEDS, TOKEN_MASK, TOKEN_TIS, WITH_CONTROLS, Study, by_seeds

__all__ = ["FEW", "STUDIES", "Study"]

FP8_CACHE = EngineSpec(kind="sglang", cache="fp8_e5m2")
FP8_WEIGHTS = EngineSpec(kind="sglang", weights="fp8_e4m3")
BF16 = EngineSpec(kind="sglang")
# As wide for each token as the dense decoder.
EXPERTS = Shape(num_experts=8, experts_per_token=2, expert_ffn_size=64)


def _two_engines(name: str, question: str, engine: EngineSpec, methods: tuple[Method, ...]) -> tuple[Study, Study]:
    """With SGLang, and with a controlled engine of the same dtypes, which is cheap: more seeds."""
    group = Group(name=name, engine=engine, methods=methods, seeds=SEEDS, num_prompts=64, dump_steps=(0, 30, 60, 119))
    controlled = replace(
        group,
        name=f"{name}_controlled",
        engine=replace(engine, kind="controlled"),
        seeds=tuple(range(1, 9)),
        dump_steps=(),
    )
    return (
        Study(name=name, question=question, groups=by_seeds(group, 1)),
        Study(name=controlled.name, question=question, groups=by_seeds(controlled, 2)),
    )


_MOE_METHODS = (NONE, TOKEN_TIS, TOKEN_MASK, FILTERS[1], FILTERS[-1])
_MOE_GROUP = Group(
    name="moe",
    engine=BF16,
    methods=_MOE_METHODS,
    seeds=SEEDS,
    num_prompts=64,
    dump_steps=(0, 30, 60, 119),
    shape=EXPERTS,
)
_MOE = Study(
    name="moe",
    question="What do corrections do for a small mixture of experts, whose engine (bf16) routes some tokens otherwise?",
    groups=by_seeds(_MOE_GROUP, 1),
)
_MOE_CONTROLLED = Study(
    name="moe_controlled",
    question="What do corrections do for a small mixture of experts (controlled bf16 engine), without and with R3?",
    groups=tuple(
        group
        for name, replays in (("moe_controlled", False), ("moe_controlled_replayed", True))
        for group in by_seeds(
            replace(_MOE_GROUP, name=name, engine=replace(BF16, kind="controlled"), replays_routing=replays), 2
        )
    ),
)
_MOE_MISMATCH = Study(
    name="moe_mismatch",
    question="Where do engine (SGLang, bf16) and trainer (float32) differ: dense, with experts, with experts replayed?",
    groups=tuple(
        part
        for name, shape, replays in (
            ("dense", Shape(), False),
            ("experts", EXPERTS, False),
            ("replayed", EXPERTS, True),
        )
        for group in [
            # Small enough for a CPU: 1 to 3 minutes each on one core.
            Group(
                name=f"moe_mismatch_{name}",
                engine=BF16,
                methods=(NONE,),
                seeds=(1, 2),
                num_steps=6,
                warmup_steps=40,
                num_prompts=12,
                dump_steps=(0, 5),
                shape=shape,
                replays_routing=replays,
            )
        ]
        for part in (group, group.with_seeds((3, 4)))
    ),
)
_LENGTH = Study(
    name="length",
    question="How do gates on products and on geometric means accept, as responses grow?",
    groups=tuple(
        Group(
            name=f"length_{name}-seed{seed}",
            engine=engine,
            methods=(NONE,),
            seeds=(seed,),
            num_steps=20,
            response_length=512,
            dump_steps=(0, 19),
        )
        for name, engine in (("fp8_cache", FP8_CACHE), ("bf16", BF16))
        for seed in SEEDS
    ),
)
_STALENESS = Study(
    name="staleness",
    question="Which correction pays off when the engine's weights are k steps old?",
    groups=tuple(
        Group(
            name=f"staleness_{steps}",
            engine=EngineSpec(dtype="bfloat16"),
            methods=FEW,
            seeds=SEEDS,
            staleness=steps,
        )
        for steps in (0, 1, 2, 4, 8, 16)
    ),
)
_NOISE = Study(
    name="noise",
    question="At which size of a state-deterministic error does training without correction fail, and what saves it?",
    groups=tuple(
        Group(
            name=f"noise_{noise:g}",
            engine=EngineSpec(dtype="float32", noise=noise),
            methods=FEW,
            seeds=SEEDS,
        )
        for noise in (0.05, 0.1, 0.2, 0.4, 0.8)
    ),
)
_BREAKING = Study(
    name="breaking",
    question="Does a long run at a high learning rate fail without correction?",
    groups=tuple(
        Group(
            name=f"breaking_lr{rate:g}_stale{steps}",
            engine=EngineSpec(dtype="bfloat16", cache="fp8_e5m2"),
            methods=FEW,
            seeds=SEEDS,
            staleness=steps,
            learning_rate=rate,
            num_steps=300,
        )
        for rate, steps in ((3e-3, 0), (3e-3, 4), (6e-3, 0), (6e-3, 4))
    ),
)

_PARTS = Study(
    name="parts",
    question="Which part of token TIS, self-normalisation, veto and geometric gate helps or hurts?",
    groups=tuple(
        Group(
            name=f"parts_{name}",
            engine=EngineSpec(dtype="bfloat16", cache="fp8_e5m2"),
            methods=(
                NONE,
                TOKEN_TIS,
                Method(name="token_tis, normalised", keys={**TOKEN_TIS.keys, "tis_batch_normalize": True}),
                Method(name="token_tis, veto", keys={**TOKEN_TIS.keys, "rs_veto_threshold": 1.0e-4}),
                Method(name="token_tis, gate", keys={**TOKEN_TIS.keys, **GATE}),
                FILTERS[-1],
            ),
            seeds=tuple(range(1, 9)),
            num_prompts=64,
            staleness=staleness,
        )
        for name, staleness in (("fresh", 0), ("stale_1", 1))
    ),
)

STUDIES = {
    study.name: study
    for study in (
        *_two_engines(
            "fp8_cache",
            "What do corrections do to training when the engine keeps keys and values in fp8?",
            FP8_CACHE,
            WITH_CONTROLS,
        ),
        *_two_engines("fp8_weights", "The same when the engine's weights are rounded to fp8.", FP8_WEIGHTS, FEW),
        *_two_engines(
            "bf16",
            "Are corrections harmless where the mismatch is small (bf16 engine, float32 trainer)?",
            BF16,
            FEW,
        ),
        _MOE,
        _MOE_CONTROLLED,
        _MOE_MISMATCH,
        _LENGTH,
        _STALENESS,
        _NOISE,
        _BREAKING,
        _PARTS,
        *ENGINE_STUDIES,
        *POLICY_STUDIES,
    )
}
