# SPDX-License-Identifier: Apache-2.0
"""Studies of which policy is meant: without mismatch, with top-p, from a checkpoint on.

Each comes in two sizes: for a GPU, and ``_small`` for a core of a CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .engines import EngineSpec
from .group import Group
from .study import FILTERS, MAIN, MORE_SEEDS, NONE, SEEDS, TOKEN_TIS, Study

_BF16, _FLOAT32 = EngineSpec(dtype="bfloat16"), EngineSpec(dtype="float32")


def _sizes(name: str, question: str, groups: Iterable[Group], *, reference: str | None = None) -> tuple[Study, Study]:
    """For a GPU with 8 seeds, and small with 4; the groups' names follow the study's."""
    whole = tuple(replace(group, name=f"{name}_{group.name}") for group in groups)
    small = tuple(
        replace(
            group,
            name=group.name.replace(name, f"{name}_small", 1),
            num_prompts=8,
            response_length=32,
            num_steps=50 + group.branch_step // 3,
            branch_step=group.branch_step // 3,
            seeds=SEEDS,
        )
        for group in whole
    )
    prefix = reference and f"{name}_{reference}"
    return (
        Study(name=name, question=question, groups=whole, reference=prefix),
        Study(
            name=f"{name}_small",
            question=question,
            groups=small,
            reference=prefix and prefix.replace(name, f"{name}_small", 1),
        ),
    )


def _group(name: str, **changes: object) -> Group:
    return Group(**{"name": name, "engine": _BF16, "methods": (NONE, TOKEN_TIS), "seeds": MORE_SEEDS, **changes})  # type: ignore[arg-type]


_CORRECTED = (NONE, TOKEN_TIS, FILTERS[-1])
_ON_POLICY = _sizes(
    "on_policy",
    "Is it better to remove the mismatch (an engine with the trainer's arithmetic) than to correct it?",
    (
        _group("removed", engine=_FLOAT32, methods=(NONE,)),
        _group("bf16"),
        _group("fp8_cache", engine=replace(_BF16, cache="fp8_e5m2"), methods=_CORRECTED),
        _group("stale", engine=_FLOAT32, methods=_CORRECTED, staleness=1),
    ),
    reference="removed",
)
_TOP_P = _sizes(
    "top_p",
    "When the engine samples with top-p 0.9: which log-probs must be compared?",
    (
        # In float32, so that nothing else differs.
        _group("whole", engine=_FLOAT32, methods=(NONE,)),
        # Without a mismatch a correction does nothing.
        _group("0.9_reported", engine=_FLOAT32, methods=(NONE,), top_p=0.9, scoring="reported"),
        _group("0.9_sampled", engine=_FLOAT32, top_p=0.9, scoring="sampled"),
        _group("0.9_kept", engine=_FLOAT32, methods=(NONE,), top_p=0.9, scoring="kept"),
    ),
    reference="whole",
)
_BRANCH = _sizes(
    "branch",
    "From one healthy checkpoint on the engine's weights are k steps old: which methods keep what was learnt?",
    (
        _group(f"stale_{steps}", engine=_FLOAT32, methods=MAIN, staleness=steps, branch_step=60, num_steps=160)
        for steps in (4, 8)
    ),
)
_TOP_P_SGLANG = Study(
    name="top_p_sglang",
    question="The same with SGLang's sampler: which log-probs must be compared at top-p 0.9?",
    groups=tuple(
        _group(
            f"top_p_sglang_{scoring}",
            engine=EngineSpec(kind="sglang"),
            methods=(NONE,),
            seeds=SEEDS,
            num_steps=60,
            top_p=0.9,
            scoring=scoring,
            dump_steps=(0, 30, 59),
        )
        for scoring in ("reported", "sampled", "kept")
    ),
)

POLICY_STUDIES = (*_ON_POLICY, *_TOP_P, *_BRANCH, _TOP_P_SGLANG)
