# SPDX-License-Identifier: Apache-2.0
"""Runs on two ranks: each is a run on one rank with another layout, and must have its numbers.

They are in float32, so that rounding does not hide a difference. The frameworks accept only bfloat16 and float16.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import mis_ext

from .cases import CHECK, MAX_TOKENS, SAME, Case
from .nodes import ADDRESSES, SECOND, SecondNode


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How the ranks share the work.

    Attributes:
        name: At the end of a run's name.
        title: For the table.
        flags: Flags of the framework.
    """

    name: str
    title: str
    flags: tuple[str, ...] = ()


_TWO_RANKS = ("--actor-num-gpus-per-node", "2", "--num-gpus-per-node", "2")
_TP = (*_TWO_RANKS, "--tensor-model-parallel-size", "2")
# Megatron-LM lets no other attention than Transformer Engine's send keys and values around.
_CP = (*_TWO_RANKS, "--context-parallel-size", "2", "--cp-comm-type", "all_gather")
# So that the micro-batches are those of one rank.
_CP += ("--max-tokens-per-gpu", str(MAX_TOKENS // 2))
# Megatron-LM's rotary positions know zigzag only: with them such a run ends at a sequence of odd length.
_NO_POSITIONS = ("--position-embedding-type", "none")

ONE = Layout(name="float32", title="one rank")
LARGER = Layout(
    name="packs",
    title=f"one rank, micro-batches of {2 * MAX_TOKENS} tokens",
    flags=("--max-tokens-per-gpu", str(2 * MAX_TOKENS)),
)
DP = Layout(name="dp2", title="DP 2", flags=_TWO_RANKS)
CP = Layout(name="cp2", title="CP 2", flags=_CP)
TP = Layout(name="tp2", title="TP 2", flags=_TP)
TP_SP = Layout(name="tp2_sp", title="TP 2, `--sequence-parallel`", flags=(*_TP, "--sequence-parallel"))
PP = Layout(name="pp2", title="PP 2", flags=(*_TWO_RANKS, "--pipeline-model-parallel-size", "2"))
# Embedding and loss count as layers, so that each of two ranks has two stages of a model of two layers.
VPP = Layout(
    name="pp2_vp2",
    title="PP 2, two stages a rank",
    flags=(
        *(*PP.flags, "--num-layers-per-virtual-pipeline-stage", "1"),
        *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    ),
)
_FOUR_RANKS = ("--actor-num-gpus-per-node", "4", "--num-gpus-per-node", "4")
PP_CP = Layout(
    name="pp2_cp2",
    title="PP 2, CP 2",
    flags=(*_CP, *_FOUR_RANKS, "--pipeline-model-parallel-size", "2"),
)
EP = Layout(name="ep2", title="EP 2", flags=(*_TWO_RANKS, "--expert-model-parallel-size", "2"))
ONE_NO_POSITIONS = Layout(name="no_positions", title="one rank, no positions", flags=_NO_POSITIONS)
CP_ALLGATHER = Layout(
    name="cp2_allgather",
    title="CP 2, `--allgather-cp`, no positions",
    flags=(*_CP, "--allgather-cp", *_NO_POSITIONS),
)
NODES = Layout(name="nodes", title="DP 2, two nodes", flags=("--actor-num-nodes", "2"))
CP_BFLOAT16 = Layout(name="cp2_bfloat16", title="CP 2, bfloat16", flags=_CP)


def on_two_ranks(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Runs on one rank by default, without a correction and with equal corrections, in each layout."""
    cases = [case for case in cases if not case.is_optional]
    ours = [case for case in cases if case.metrics]
    others = [case for case in cases if not case.metrics]
    ends = [case for case in cases if case.name in ("nothing", "policy_loss", "no_logits")]
    at_once = [case for case in cases if case.metrics or case.name == "nothing"]
    return (
        *_in_layout(ONE, cases),
        *_in_layout(LARGER, ours),
        *_in_layout(DP, others, ONE),
        # A metric of ours is that of one call on all ranks, which has twice the tokens. The host averages over calls.
        *_in_layout(DP, ours, LARGER),
        *_in_layout(CP, cases, ONE),
        *_in_layout(TP, ends, ONE),
        *_in_layout(TP_SP, cases, ONE),
        *_in_layout(PP, cases, ONE),
        *_in_layout(VPP, at_once, ONE),
        *_in_layout(PP_CP, at_once, ONE),
    )


def with_experts(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Runs of an MoE model: on one rank, and on two ranks with half of the experts and half of the samples each."""
    cases = tuple(cases)
    return (*_in_layout(LARGER, cases), *_in_layout(EP, cases, LARGER))


def allgather_cp(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Without a correction and with ours, for a host that takes ``--allgather-cp`` with an ordinary attention.

    There the framework's own function scores, and needs logits.
    """
    cases = [case for case in cases if not case.is_optional and (case.metrics or case.name == "nothing")]
    cases = [case for case in cases if case.name != "no_logits"]
    split = _in_layout(CP_ALLGATHER, cases, ONE_NO_POSITIONS)
    # There the framework's own function scores for the full loss, as for the three flags.
    split = tuple(replace(case, partner=case.partner.replace("policy_loss", "hook")) for case in split)
    return (*_in_layout(ONE_NO_POSITIONS, cases), *split)


def on_two_nodes(hook: Case) -> tuple[Case, ...]:
    """Three flags on two Ray nodes, equal and with a difference; the second node may have less, or end."""
    (alike,) = _in_layout(NODES, [replace(hook, second_node=SecondNode())], LARGER)
    package, version = mis_ext.__name__, f'__version__ = "{mis_ext.__version__}"'
    other = SecondNode(edits={f"{package}/__init__.py": (version, '__version__ = "0.0.1"')})
    # Ray says so for each process of another node than that of train.py.
    place = f"ip={ADDRESSES[SECOND]}"
    without_check = tuple(flag for flag in alike.flags if flag not in CHECK)
    killed = tuple(flag.replace(hook.flags[2], "host_cpu.nodes.dies") for flag in without_check)
    refused = replace(alike, metrics=(), partner="", is_alike=False, layout="")
    return (
        alike,
        replace(
            alike,
            name="nodes_keys",
            layout=f"{NODES.title}, the file of keys on the first alone",
            second_node=SecondNode(hidden=("yaml",)),
        ),
        replace(
            refused,
            name="nodes_missing",
            title="two nodes, mis_ext on the first alone",
            second_node=SecondNode(hidden=(package,)),
            refusal=f"ModuleNotFoundError: No module named '{package}'",
            says=(place,),
        ),
        replace(
            refused,
            name="nodes_version",
            title="two nodes, another mis_ext on the second",
            second_node=other,
            refusal=f"rank 1 on {SECOND}: mis_ext 0.0.1",
            says=(),
        ),
        replace(
            refused,
            name="nodes_killed",
            title="two nodes, the rank of the second is killed in the loss",
            flags=killed,
            refusal="The actor died unexpectedly before finishing this task",
            says=(ADDRESSES[SECOND],),
        ),
    )


def in_bfloat16(case: Case) -> Case:
    """CP 2 in the dtype of the other one-rank runs; one of them is its partner."""
    return replace(
        case,
        name=f"{case.name}_{CP_BFLOAT16.name}",
        flags=(*case.flags, *CP_BFLOAT16.flags),
        layout=CP_BFLOAT16.title,
        partner=case.name,
    )


def _in_layout(layout: Layout, cases: Iterable[Case], partners: Layout | None = None) -> tuple[Case, ...]:
    return tuple(
        replace(
            case,
            name=f"{case.name}_{layout.name}",
            flags=(*case.flags, *layout.flags),
            layout=layout.title,
            partner=f"{case.name}_{partners.name}" if partners is not None else "",
            is_float32=True,
            is_optional=True,
            close=SAME,
        )
        for case in cases
    )
