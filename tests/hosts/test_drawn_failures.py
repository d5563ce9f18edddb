# SPDX-License-Identifier: Apache-2.0
"""One rank fails somewhere in a call: all ranks end soon, and those that needed it name it.

A scenario draws ranks, a call, its keys, the rank that fails, and where: in its keys, in its data, in the reducer of a
user, or in any tensor operation of the call, so also in a metric, in the sums of a method, and between collectives.

    pytest -m long_run tests/hosts/test_drawn_failures.py    # 200 scenarios
"""

import random
import re
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import loss_cases
import pytest
import torch
import torch.distributed as dist
from hook_batches import make_batch
from process_ranks import run_checks
from torch.utils._python_dispatch import TorchDispatchMode
from zigzag import take

import mis_ext
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.megatron import Host, VocabularyPart, batch_loss, fused_scores, plain_scores
from mis_ext.hosts.session import shared_run
from mis_ext.loss.policy import MILES_METRICS

WORLD = 4
SECONDS = 100.0
"""That a rank would wait in vain. One that does not ends in 0.1 s, but may start late on a busy machine."""
TOPOLOGIES = {
    "CP 2": (1, 2, 1),
    "DP 2": (1, 1, 2),
    "CP 3": (1, 3, 1),
    "DP 3": (1, 1, 3),
    "CP 4": (1, 4, 1),
    "CP 2 x DP 2": (1, 2, 2),
    "TP 2": (2, 1, 1),
    "TP 2 x CP 2": (2, 2, 1),
    "TP 2 x DP 2": (2, 1, 2),
}
"""Sizes of the tensor-, context-, and data-parallel groups; tensor-parallel ranks are neighbors."""
REDUCER = "custom_pg_loss_reducer_function_path"
OF_HOOK = [
    {},
    {"tis_level": "sequence", "tis_batch_normalize": True, "mis_denominator": "kept"},
    {"tis_mode": "mask", "mis_metrics": "all"},
    {"use_rs": True, "rs_gates": [{"reduce": "segment_mean", "low": 0.5, "high": 2.0}]},
    {"rs_veto_threshold": 1e-4, "mis_metrics": ["mis_k3_kl"]},
]
OF_LOSS = [
    loss_cases.GATES,
    loss_cases.SEQUENCES,
    loss_cases.GATES | {"advantage_estimator": "gspo"},
    {"advantage_estimator": "gspo"},
    {"use_opsm": True, "opsm_delta": 1e-4},
    loss_cases.GATES | {REDUCER: "loss_cases.reduce_by_constant"},
    *({"eps_clip": 0.2, "eps_clip_high": None, "mis_loss_method": name} for name in ("segment_rs", "ctpo", "trm")),
    {"eps_clip": 0.2, "eps_clip_high": None, "use_rollout_logprobs": True, "mis_loss_method": "p3o"},
]
MISSPELLED = {"tis_levle": "token"}
SPOILED = {
    "a length that is no integer": ("response_lengths", lambda x: [*x[:-1], x[-1] + 0.5]),
    "lengths as tensors": ("loss_masks", lambda x: x[:-1]),
    "a short mask": ("loss_masks", lambda x: [x[0][:-1], *x[1:]]),
    "no list": ("loss_masks", lambda _: 3),
    # Context-parallel ranks exchange rows of these lengths.
    "fewer lengths": ("response_lengths", lambda x: x[:-1]),
    "no lengths": ("response_lengths", lambda _: None),
}


class Scenario(NamedTuple):
    """What is drawn.

    ``place``: where in the call the rank fails, as a share of its operations. ``has_data``: whether it has log-probs.
    """

    topology: str
    is_loss: bool
    keys: dict[str, Any]
    failing: int
    fault: str
    place: float
    is_first_call: bool
    has_data: bool


def drawn(seed: int) -> Scenario:
    draw = random.Random(seed)
    topology = draw.choice([*TOPOLOGIES])
    is_loss = topology.startswith("TP") or draw.random() < 0.5
    keys = draw.choice(OF_LOSS if is_loss else OF_HOOK)
    # An operation more often than not: it may be any.
    tp, cp, dp = TOPOLOGIES[topology]
    faults = ["keys", *(name for name in SPOILED if cp == 1 or name != "fewer lengths"), *["operation"] * 8]
    if tp > 1:
        # Keys and lengths are read before the scores.
        faults = ["no list", "operation"]
    if is_loss and REDUCER in keys:
        faults += ["loss_cases.refuse_masks", "loss_cases.refuse_loss"] * 3
    fault, failing = draw.choice(faults), draw.randrange(tp * cp * dp)
    # Keys are read in the first call alone.
    is_first_call = draw.random() < 0.5 or fault == "keys" or fault.startswith("loss_cases")
    place, has_data = draw.random(), is_loss or draw.random() < 0.7
    return Scenario(topology, is_loss, keys, failing, fault, place, is_first_call, has_data)


class Watched(TorchDispatchMode):
    """Counts operations, and collectives by group; fails once before an operation."""

    def __init__(self, fails_before: int | None = None) -> None:
        super().__init__()
        self.fails_before, self.num_operations, self.collectives = fails_before, 0, Counter[str]()
        self.joined = Counter[str]()
        """The collectives before the failure."""
        self.first: dict[str, int] = {}
        """Of each group the operation that is its first collective."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += 1
        if self.num_operations == self.fails_before:
            self.joined = self.collectives.copy()
            raise torch.OutOfMemoryError("out of memory, says the test")
        if func.namespace == "c10d":
            group = next(each for each in args if isinstance(each, torch.ScriptObject))
            name = dist.ProcessGroup.unbox(group).group_name
            self.collectives[name] += 1
            self.first.setdefault(name, self.num_operations)
        return func(*args, **(kwargs or {}))


class Ranks:
    """The process groups of all topologies, and this rank's place in each."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._places = {name: self._make(*sizes) for name, sizes in TOPOLOGIES.items()}
        self.everyone = dist.new_group(range(WORLD))

    def _make(self, tp: int, cp: int, dp: int) -> tuple[Groups, VocabularyPart] | None:
        grid = torch.arange(tp * cp * dp).view(dp, cp, tp)
        mine: list[Any] = [None, None, None]
        # Every process makes every group.
        for axis, lines in enumerate((grid.mT.reshape(-1, cp), grid.movedim(0, -1).reshape(-1, dp), grid.view(-1, tp))):
            for line in lines.tolist():
                group = dist.new_group(line, timeout=timedelta(seconds=SECONDS)) if len(line) > 1 else None
                if self._rank in line:
                    mine[axis] = group
        if self._rank >= tp * cp * dp:
            return None
        groups = Groups.of_process_groups(cp_group=mine[0], dp_group=mine[1])
        return groups, VocabularyPart(mine[2], self._rank % tp)

    def place(self, topology: str) -> tuple[Groups, VocabularyPart] | None:
        return self._places[topology]


def call(scenario: Scenario, args: Any, batch: dict[str, Any], groups: Groups, part: VocabularyPart) -> None:
    """One call of the hook, or of the whole loss."""
    if not scenario.is_loss:
        axes = (groups.cp_rank, groups.cp_size, groups.cp_group), (groups.dp_rank, groups.dp_size, groups.dp_group)
        cp, dp = (type("Axis", (), dict(zip(("rank", "size", "group"), axis, strict=True))) for axis in axes)
        state = type("State", (), {"cp": cp, "intra_dp": dp})
        mis_ext.compute_mis_weights_with_cp(args, **batch, parallel_state=state, max_seq_lens=None)
        return
    given = dict(batch)
    logits = given.pop("logits")
    run = shared_run(args, groups, device=torch.device("cpu"), whole_loss=True)
    score = plain_scores if part.group is None else partial(fused_scores, part=part, temperature=1.0)
    batch_loss(run, Host(groups, score, MILES_METRICS if part.group is None else frozenset()), given, logits)


def batch_of(scenario: Scenario, groups: Groups, part: VocabularyPart) -> dict[str, Any]:
    place = {"cp_rank": groups.cp_rank, "cp_size": groups.cp_size}
    if scenario.is_loss:
        local = loss_cases.local_batch(loss_cases.whole_batch(), **place)
        if part.group is not None:
            local["logits"] = local["logits"].chunk(2, -1)[part.rank]
        return local | {"logits": local["logits"].clone().requires_grad_()}
    batch = make_batch(seed=groups.dp_rank)
    losses = batch["pg_loss"].split(batch["response_lengths"])
    parts = {"pg_loss": losses, **{name: batch[name] for name in ("train_log_probs", "rollout_log_probs")}}
    local = {name: take(each, total_lengths=batch["total_lengths"], **place) for name, each in parts.items()}
    return batch | local | {"pg_loss": torch.cat(local["pg_loss"])}


class Outcome(NamedTuple):
    """What a rank raised, after how many seconds; its groups, and those in which a collective was still due."""

    said: str
    seconds: float
    groups: set[str]
    due: set[str]

    @property
    def names(self) -> bool:
        return re.search(r"failed on rank \d|tensor-parallel rank \d+ failed", self.said) is not None


def outcome_of(scenario: Scenario, ranks: Ranks) -> Outcome | None:
    """The outcome on this rank; None where it is none of those that are drawn."""
    place = ranks.place(scenario.topology)
    if place is None:
        return None
    is_failing, batch = dist.get_rank() == scenario.failing, batch_of(scenario, *place)
    if is_failing and not scenario.has_data:
        batch["rollout_log_probs"] = None
    guarded = {} if scenario.is_loss else {"use_tis": True, "mis_guard": "warn"}
    make_args = partial(loss_cases.host_args, **guarded | scenario.keys)
    # What a process keeps is there before operations are counted.
    args, good, watched = make_args(), Watched(), Watched()
    call(scenario, args, batch, *place)
    args = make_args() if scenario.is_first_call else args
    with good:
        call(scenario, args, batch, *place)
    args = make_args() if scenario.is_first_call else args
    if is_failing and scenario.fault == "operation":
        # Tensor-parallel ranks learn of no error before the scores: see the page of limits.
        first = 0 if place[1].group is None else good.first[place[1].group.group_name]
        watched = Watched(1 + first + int(scenario.place * (good.num_operations - first)))
    elif is_failing and scenario.fault == "keys":
        args = make_args(**MISSPELLED)
    elif is_failing and scenario.fault in SPOILED:
        name, spoil = SPOILED[scenario.fault]
        batch[name] = spoil(batch[name])
        if scenario.fault == "lengths as tensors":
            batch["response_lengths"] = [*map(torch.tensor, batch["response_lengths"])]
    elif is_failing:
        args = make_args(**{REDUCER: scenario.fault})
    if scenario.fault in SPOILED and scenario.is_first_call:
        # In the first one ranks hear first that all of them could read their keys.
        watched.joined.update([group.group_name for group in place[0].started_together])
    if scenario.fault in SPOILED and SPOILED[scenario.fault][0] == "loss_masks" and place[1].group is not None:
        # Masks are read behind the scores.
        watched.joined[place[1].group.group_name] = good.collectives[place[1].group.group_name]
    elif is_failing and scenario.fault.startswith("loss_cases"):
        # Which of the sums come behind the reducer is not known here.
        watched.joined = good.collectives
    start, said = time.monotonic(), ""
    try:
        with watched:
            call(scenario, args, batch, *place)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return Outcome(said, time.monotonic() - start, {*good.collectives}, {*(good.collectives - watched.joined)})


def check(seeds: range, rank: int) -> None:
    """Run the scenarios on this rank; all ranks compare what each of them found."""
    ranks, wrong, found = Ranks(), [], Counter[str]()
    for seed in seeds:
        scenario = drawn(seed)
        outcomes: list[Any] = [None] * WORLD
        dist.all_gather_object(outcomes, outcome_of(scenario, ranks), group=ranks.everyone)
        culprit: Outcome = outcomes[scenario.failing]
        if culprit.said == "":
            # The call had fewer operations than the one before.
            found["no failure"] += 1
            continue
        for number, outcome in enumerate(outcomes):
            if outcome is None:
                continue
            if number == scenario.failing:
                is_right, kind = True, "failed"
            elif outcome.said:
                is_right, kind = outcome.names, "named it"
            else:
                # No rank waited for the one that failed.
                is_right, kind = not culprit.due & outcome.groups, "did not need it"
            found[kind] += 1
            if not is_right or outcome.seconds > SECONDS:
                wrong.append(f"{seed}: rank {number} of {scenario}: {outcome}")
        if wrong:
            # A group may wait for its timeout in later scenarios too.
            break
    assert not wrong, "\n".join(wrong)
    assert min(found["failed"], found["named it"]) > 0.4 * len(seeds)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(200), marks=pytest.mark.long_run)], ids=str)
def test_all_ranks_end_soon_and_name_the_one_that_failed(seeds, tmp_path) -> None:
    reports = run_checks({"drawn": partial(check, seeds)}, folder=tmp_path, world_size=WORLD, seconds=SECONDS)
    assert [report["drawn"] for report in reports] == [""] * WORLD
