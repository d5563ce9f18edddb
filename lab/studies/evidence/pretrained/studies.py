# SPDX-License-Identifier: Apache-2.0
"""What is studied with a pretrained model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evidence.engines import EngineSpec
from evidence.group import Method
from evidence.study import NONE, TOKEN_MASK, TOKEN_TIS, Study, preset

from .group import PretrainedGroup, runs_of

BF16 = EngineSpec(kind="sglang")
FOUR_SEEDS, EIGHT_SEEDS = (tuple(range(1, count + 1)) for count in (4, 8))

# Engine and the trainer's dtype. On a CPU SGLang has no caches of 8 bits and no deterministic mode.
_ON_A_CPU = {
    "bf16": (BF16, "bfloat16"),
    "float32_trainer": (BF16, "float32"),
    "fp16": (replace(BF16, dtype="float16"), "float16"),
    "e4m3_weights": (replace(BF16, weights="fp8_e4m3"), "bfloat16"),
    "fp32_head": (replace(BF16, settings={"enable_fp32_lm_head": True}), "bfloat16"),
    "fp8_products": (replace(BF16, weights="fp8_blocks"), "bfloat16"),
    "int8_products": (replace(BF16, weights="int8_blocks"), "bfloat16"),
}
_SETTINGS = _ON_A_CPU | {
    "e4m3_cache": (replace(BF16, cache="fp8_e4m3"), "bfloat16"),
    "e5m2_cache": (replace(BF16, cache="fp8_e5m2"), "bfloat16"),
    "deterministic": (replace(BF16, settings={"enable_deterministic_inference": True}), "bfloat16"),
}

AGAIN = Method(name="none, again", stream=1)
BYPASS = Method(name="bypass", bypasses=True)
# "Rollout routing replay", R3 (arXiv 2510.11370).
REPLAY = Method(name="replay", replays_routing=True)
REPLAY_TIS = Method(name="replay, token_tis", keys=TOKEN_TIS.keys, replays_routing=True)
# A slower learner in place of a correction.
SLOWED = Method(name="none, slower as k3 grows", slows_down=True)


def token_tis(cap: float) -> Method:
    """Token ratios, truncated."""
    return Method(name=f"token_tis {cap:g}", keys=TOKEN_TIS.keys | {"tis_upper_bound": cap})


_FLOOR = [
    PretrainedGroup(
        name=f"pretrained_floor_lr{rate:g}",
        engine=BF16,
        methods=(NONE, AGAIN),
        seeds=FOUR_SEEDS,
        learning_rate=rate,
        ages=(1, 2, 4, 8),
        dump_steps=(0, 30, 59),
    )
    # The one that is known to learn first.
    for rate in (1e-5, 3e-6, 1e-6)
]
_FRESH = [
    PretrainedGroup(
        name=f"pretrained_fresh_{name}",
        engine=_SETTINGS[name][0],
        methods=(NONE, AGAIN, TOKEN_TIS),
        seeds=EIGHT_SEEDS,
        dump_steps=(0, 30, 59),
    )
    for name in ("bf16", "e4m3_cache", "fp8_products")
]
# At 8 steps runs of the tiny model collapse: few methods, for the question whether this one's do.
_MANY = (NONE, AGAIN, BYPASS, TOKEN_TIS, TOKEN_MASK)
_STALE = [
    PretrainedGroup(
        name=f"pretrained_stale_{age}",
        engine=BF16,
        methods=methods,
        seeds=EIGHT_SEEDS,
        staleness=age,
        trained_steps=12,
        dump_steps=(8, 59),
    )
    for age, methods in (
        (1, (*_MANY, token_tis(1.5), token_tis(5.0))),
        (4, (*_MANY, token_tis(1.5), token_tis(5.0))),
        (8, _MANY),
    )
]

# 300 steps against the coarsest cache, with which published runs of a larger model collapsed
# (lab/evidence/published.md).
_STEPS = PretrainedGroup(
    name="pretrained_long_e5m2_cache",
    engine=_SETTINGS["e5m2_cache"][0],
    methods=(NONE,),
    seeds=FOUR_SEEDS,
    task="arithmetic_steps",
    response_length=256,
    num_steps=300,
    num_prompts=32,
    num_evaluated=128,
    eval_interval=25,
    micro_batch_size=32,
    dump_steps=(0, 75, 150, 299),
)


def _beside_bf16(name: str, methods: tuple[Method, ...], **settings: Any) -> list[PretrainedGroup]:
    """Methods against the coarsest cache, and none against an engine in bf16."""
    engines = {"e5m2_cache": methods, "bf16": (NONE,)}
    return [
        replace(_STEPS, name=f"{name}_{engine}", engine=_SETTINGS[engine][0], methods=chosen, **settings)
        for engine, chosen in engines.items()
    ]


# The model learns to leave the steps away. Stories stay long, and the next word stays open.
_STORIES = _beside_bf16(
    "pretrained_stories",
    (NONE, TOKEN_MASK, TOKEN_TIS, AGAIN, preset("sequence_mis"), SLOWED),
    task="story",
    response_length=192,
)
# Words in any order are worth as much there. Here an answer must remember the question, and few do at first.
_SPARSE = _beside_bf16(
    "pretrained_sparse",
    (NONE, AGAIN, TOKEN_TIS, TOKEN_MASK),
    task="story_answer",
    num_steps=200,
    eval_interval=20,
    dump_steps=(0, 50, 100, 199),
)


def _first_rollout(name: str, engine: EngineSpec, dtype: str, *, num_prompts: int) -> PretrainedGroup:
    """All log-probs of one rollout."""
    return PretrainedGroup(
        name=name,
        engine=engine,
        dtype=dtype,
        methods=(NONE,),
        seeds=(1, 2),
        num_steps=1,
        num_prompts=num_prompts,
        num_evaluated=1,
        num_dumped=512,
        dump_steps=(0,),
    )


def _one_by_one(conditions: Sequence[PretrainedGroup]) -> tuple[PretrainedGroup, ...]:
    """All runs of a condition before the next one: a process makes its engine once for each."""
    return tuple(group for condition in conditions for group in runs_of([condition]))


_CACHES = [
    replace(
        _first_rollout(
            f"pretrained_cache_{name}{f'_{rounded}' if rounded else ''}", *_SETTINGS[f"{name}_cache"], num_prompts=64
        ),
        simulated_cache=rounded,
    )
    for name, rounded in (("e4m3", ""), ("e4m3", "kv"), ("e4m3", "qkv"), ("e5m2", ""), ("e5m2", "kv"))
]
# fp16 removes the mismatch, and lets small updates reach the weights. With a cache of 8 bits it does the second alone.
_TRAINERS = _SETTINGS | {
    "fp16_e4m3_cache": (replace(BF16, dtype="float16", cache="fp8_e4m3"), "float16"),
    "fp16_trainer": (BF16, "float16"),
    "fp16_engine": (replace(BF16, dtype="float16"), "bfloat16"),
    # Numbers of bf16 lie anywhere among those that are rounded to one of 8 bits.
    "fp16_trainer_fp8_products": (replace(BF16, weights="fp8_blocks"), "float16"),
}
_ONE_SIDE = ("fp16_trainer", "fp16_engine", "fp16_trainer_fp8_products")
_PRECISION = [
    PretrainedGroup(
        name=f"pretrained_precision_{name}",
        engine=_TRAINERS[name][0],
        dtype=_TRAINERS[name][1],
        # The engine's weights stay behind the trainer's, as if they were old.
        methods=(NONE, TOKEN_TIS) if name == "fp16_trainer" else (NONE,),
        seeds=EIGHT_SEEDS,
        dump_steps=(0, 30, 59),
    )
    for name in ("bf16", "fp16", "deterministic", "fp16_e4m3_cache", *_ONE_SIDE)
]
# No mismatch at all, and small updates are as invisible as in any bf16.
_PRECISION.append(replace(_PRECISION[0], name="pretrained_precision_aligned", is_aligned=True))
# Products in fp16 of weights that are numbers of bf16: what is left of fp16's gain is not that of its weights.
_PRECISION.append(replace(_PRECISION[1], name="pretrained_precision_fp16_rounded_weights", rounded_to="bfloat16"))
# Weights in bf16 of which small updates move as many as they should, on average.
_PRECISION.append(replace(_PRECISION[0], name="pretrained_precision_bf16_dithered", is_dithered=True))
# At a tenth of the learning rate, which is usual for larger models, updates are smaller against both roundings.
_PRECISION += [
    replace(group, name=f"{group.name}_lr1e-06", learning_rate=1e-6, num_steps=120)
    for group in (*_PRECISION[:2], _PRECISION[-1])
]
# Is what bf16 loses at that learning rate lost, or later?
_SMALL_UPDATES = [
    replace(group, name=f"pretrained_small_updates_{name}", num_steps=300, eval_interval=20, dump_steps=(0, 150, 299))
    for name, group in (("bf16", _PRECISION[-3]), ("bf16_dithered", _PRECISION[-1]))
]
# Or is the learning rate too small, which dithering then hides?
_SMALL_UPDATES += [
    replace(group, name=f"{group.name}_lr{rate:g}", learning_rate=rate, seeds=FOUR_SEEDS)
    for rate in (3e-6, 1e-5, 2e-6)
    for group in _SMALL_UPDATES[:2]
]
_ATLAS = [_first_rollout(f"pretrained_atlas_{name}", *each, num_prompts=64) for name, each in _SETTINGS.items()]
_ATLAS_CPU = [_first_rollout(f"pretrained_atlas_cpu_{name}", *each, num_prompts=8) for name, each in _ON_A_CPU.items()]

NUM_EXPERTS = 8
_MOE = PretrainedGroup(
    name="pretrained_moe",
    engine=BF16,
    methods=(NONE, AGAIN, TOKEN_TIS, preset("icepop"), REPLAY, REPLAY_TIS),
    seeds=EIGHT_SEEDS,
    dump_steps=(0, 30, 59),
    # Half the time of the dense models' 64.
    micro_batch_size=128,
    experts=NUM_EXPERTS,
)


def _atlas_moe(name: str, *, num_prompts: int) -> list[PretrainedGroup]:
    """The first rollout of the dense model and of the mixture, with its engine's experts and without; no training."""
    # Measured when the runner could not tell the experts of a CUDA graph.
    without_graphs = replace(BF16, settings={"disable_cuda_graph": True})
    dense = _first_rollout(f"{name}_dense", without_graphs, "bfloat16", num_prompts=num_prompts)
    dense = replace(dense, updates=0)
    return [dense, replace(dense, name=f"{name}_mixture", methods=(NONE, REPLAY), experts=NUM_EXPERTS)]


_SMOKE = PretrainedGroup(
    name="pretrained_smoke",
    engine=BF16,
    methods=(NONE, AGAIN, BYPASS, TOKEN_TIS),
    seeds=(1,),
    staleness=1,
    num_steps=3,
    num_prompts=4,
    samples_per_prompt=4,
    response_length=16,
    num_evaluated=8,
    micro_batch_size=8,
    ages=(1,),
    dump_steps=(0,),
    trained_steps=1,
)
_SMOKE_MOE = replace(_SMOKE, name="pretrained_smoke_moe", methods=(NONE, REPLAY_TIS), experts=NUM_EXPERTS)

PRETRAINED_STUDIES = (
    Study(
        name="pretrained_smoke", question="Does everything run on this machine?", groups=runs_of([_SMOKE, _SMOKE_MOE])
    ),
    Study(
        name="pretrained_floor",
        question="How much do two runs with one seed differ, what is learned, and how does k3 grow with age?",
        groups=runs_of(_FLOOR),
    ),
    Study(
        name="pretrained_stale",
        question="Which loss for weights that are 1, 4 and 8 updates old, from a trained checkpoint on?",
        groups=runs_of(_STALE),
    ),
    Study(
        name="pretrained_fresh",
        question="Does a fresh engine need a correction: bf16, a cache in e4m3, weights and products in fp8?",
        groups=_one_by_one(_FRESH),
    ),
    Study(
        name="pretrained_atlas",
        question="Which mismatch does each setting of engine and trainer have, before any training?",
        groups=_one_by_one(_ATLAS),
    ),
    Study(
        name="pretrained_atlas_cpu",
        question="The same with SGLang on a CPU: what do fp16 and numbers of 8 bits do there?",
        groups=_one_by_one(_ATLAS_CPU),
    ),
    Study(
        name="pretrained_atlas_moe",
        question="Which mismatch has a mixture of experts beside its dense model, before any training?",
        groups=runs_of(_atlas_moe("pretrained_atlas_moe", num_prompts=64)),
    ),
    Study(
        name="pretrained_atlas_moe_cpu",
        question="Which mismatch has a mixture of experts beside its dense model, with SGLang on a CPU?",
        groups=runs_of(_atlas_moe("pretrained_atlas_moe_cpu", num_prompts=8)),
    ),
    Study(
        name="pretrained_moe",
        question="Does a mixture of experts with fresh weights need a correction, or its engine's experts?",
        groups=runs_of([_MOE]),
    ),
    Study(
        name="pretrained_long",
        question="Does anything collapse in 300 steps with a sparse reward and a coarse cache?",
        groups=runs_of([_STEPS]),
    ),
    Study(
        name="pretrained_stories",
        question="Does anything collapse in 300 steps with a coarse cache, while answers stay long and open?",
        groups=_one_by_one(_STORIES),
    ),
    Study(
        name="pretrained_sparse",
        question="Does anything collapse in 200 steps where a sparse reward needs long, open, coherent answers?",
        groups=runs_of(_SPARSE),
    ),
    Study(
        name="pretrained_cache",
        question="What is left of a coarse cache's mismatch, once the trainer rounds as the cache does?",
        groups=_one_by_one(_CACHES),
    ),
    Study(
        name="pretrained_precision",
        question="What is gained by removing the mismatch or a part of it: fp16 on a side or both, an aligned engine?",
        groups=runs_of(_PRECISION),
    ),
    Study(
        name="pretrained_small_updates",
        question="Does bf16 at a small learning rate catch up with its dithered copy, and at a larger one?",
        groups=runs_of(_SMALL_UPDATES),
    ),
)
