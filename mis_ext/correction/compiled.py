# SPDX-License-Identifier: Apache-2.0
"""The passes of a correction as graphs of ``torch.compile``: the same functions, with fewer launches.

Each configuration has its own graphs. A call without collectives runs one graph of all passes (:func:`run_passes`). A
call with collectives runs one graph for tokens, one for responses, and one for the outputs. The output graph computes
tokens and responses again, so that only sums pass from graph to graph. The graphs accept calls of any length: padding
avoids the sizes 0 and 1, for which torch recompiles. These steps are outside of the graphs:

- before: the casts to float32, the lengths, the gathered values of segments, and padding (:meth:`Graphs.parts`);
- between: the collectives of sums;
- after: removal of the padding, the gathered mask (context parallelism), the product with the loss, and properties of
  ``Correction`` such as ``metrics``, which are computed when they are read.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.fx.experimental._config as symbols
from torch import Tensor

from mis_ext.correction import correct
from mis_ext.correction.collectives import global_rank
from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.correct import Exchange, Inputs, Passed, Plan
from mis_ext.correction.layout import Blocks, PackedLayout
from mis_ext.validation import MismatchWarning

_LOG = logging.getLogger("mis_ext")
_ANY_SIZES = symbols.patch(use_duck_shape=False)
"""Sizes that are equal in the first call may differ in later calls."""
_FIXED_BOUNDS = torch._dynamo.config.patch(specialize_float=True)
"""The floats of a plan are constants of its graphs."""


@functools.lru_cache(maxsize=32)
def graphs_of(config: CorrectionConfig, *, token_metrics: bool) -> Graphs:
    """The graphs of a configuration. Equal configurations share them."""
    return Graphs(correct.plan_of(config, token_metrics=token_metrics))


class Graphs:
    """The passes of one configuration, each a graph that the first call compiles.

    All ranks of a call run in the same mode: compiled code rounds differently, and context-parallel ranks must agree on
    every keep mask. So the first call with other ranks compiles, computes without graphs, and reports a failure.

    Attributes:
        obstacle: Why calls run without graphs; None if they run with graphs.
        is_agreed: Whether the ranks have exchanged whether they have graphs.
        is_compared: Whether a call has compared the graphs with the passes without graphs.
    """

    def __init__(self, plan: Plan) -> None:
        self.obstacle: str | None = None
        self.is_agreed = self.is_compared = False
        self._plan = plan
        _LOG.info("mis_ext compiles the correction; on a GPU this takes 20 to 40 s, once per configuration")
        self._graph_of_all = _compiled(_all_passes)
        self._token_graph = _compiled(_tokens)
        self._response_graph = _compiled(_responses)
        self._output_graph = _compiled(_outputs)

    def run(self, x: Inputs, layout: PackedLayout, over_cp: Exchange, over_dp: Exchange) -> Passed:
        """The passes of a call, with graphs if all ranks could compile them."""
        if over_cp is None and over_dp is None:
            return self._parts_if_possible(x, layout, None, None)
        if not self.is_agreed:
            return self._agree(x, layout, over_cp, over_dp)
        if self.obstacle is None:
            return self.parts(x, layout, over_cp, over_dp)
        return correct.run_passes(x, layout.blocks, self._plan, over_cp, over_dp)

    def _agree(self, x: Inputs, layout: PackedLayout, over_cp: Exchange, over_dp: Exchange) -> Passed:
        """The first call with other ranks runs without graphs. Its status reports whether they were compiled."""
        # Copies replace the exchanges, because later a graph reads memory that the previous graph did not allocate.
        copies = [None if exchange is None else torch.clone for exchange in (over_cp, over_dp)]
        self._parts_if_possible(x, layout, *copies)
        own_status = -math.inf if self.obstacle is None else -(global_rank() + 1.0)
        found = correct.run_passes(x, layout.blocks, self._plan, over_cp, over_dp, status=own_status)
        self.is_agreed = True
        # Only this call waits for its status.
        status = float(found.group_A[-1])
        if -math.inf < status < 0.0 and self.obstacle is None:
            self._give_up(f"rank {round(-status) - 1} could not compile")
        return found

    def parts(self, x: Inputs, layout: PackedLayout, over_cp: Exchange, over_dp: Exchange) -> Passed:
        """Run the passes as one graph, or as three graphs with the exchanges between them."""
        plan, length_S, num_blocks = self._plan, layout.length_S, layout.num_blocks
        num_tokens, num_responses = layout.num_local_tokens, layout.num_sequences
        # No size of a graph may be 0 or 1: add two responses of one masked token each, and remove them afterwards.
        if num_responses < 2 or num_blocks < 2:
            length_S, num_blocks = torch.nn.functional.pad(length_S, (0, 2), value=1), num_blocks + 2
            x = Inputs._make(None if row is None else torch.nn.functional.pad(row, (0, 2)) for row in x)
        if over_cp is None and over_dp is None:
            found: Passed = self._graph_of_all(x, length_S, num_blocks, plan)
        else:
            merged_FS = self._token_graph(x, length_S, num_blocks, plan)
            if over_cp is not None:
                own_FS, added_FS = merged_FS.tensor_split([num_responses], dim=1)
                merged_FS = torch.cat([over_cp(own_FS), added_FS], dim=1)
            own_A = self._response_graph(merged_FS, plan)
            group_A = own_A if over_dp is None else over_dp(own_A)
            found = self._output_graph(x, length_S, num_blocks, (merged_FS, own_A, group_A), plan)
        return found._replace(
            merged_FS=found.merged_FS[:, :num_responses],
            weights_T=found.weights_T[:num_tokens],
            loss_mask_T=found.loss_mask_T[:num_tokens],
            keep_S=found.keep_S[:num_responses],
            metrics_MT=None if found.metrics_MT is None else found.metrics_MT[:, :num_tokens],
        )

    def _parts_if_possible(self, x: Inputs, layout: PackedLayout, over_cp: Exchange, over_dp: Exchange) -> Passed:
        """Run the passes with graphs, or without if graphs failed to compile or gave different values."""
        try:
            if self.obstacle is None:
                found = self.parts(x, layout, over_cp, over_dp)
                if not self.is_compared:
                    _check_equal(found, correct.run_passes(x, layout.blocks, self._plan, over_cp, over_dp))
                    self.is_compared = True
                return found
        except torch.cuda.OutOfMemoryError:
            raise
        # If the error is not one of the compiler, the passes without graphs raise it again.
        except Exception as error:
            # The first line of torch's message names the backend, and the second line the error.
            said = " ".join(str(error).strip().splitlines()[:2])
            self._give_up(f"{type(error).__name__}: {said}" if said else repr(error))
        return correct.run_passes(x, layout.blocks, self._plan, over_cp, over_dp)

    def _give_up(self, obstacle: str) -> None:
        self.obstacle = obstacle
        warnings.warn(
            f"mis_compile: the correction runs without torch.compile ({obstacle}). Values are equal up to rounding, "
            "and it needs more kernel launches. Set mis_compile: false to silence this warning",
            MismatchWarning,
            stacklevel=2,
        )


def _check_equal(found: Passed, expected: Passed) -> None:
    """Raise an error if graphs give different values, because a compiler bug may be silent."""
    is_near_T = torch.isclose(found.weights_T, expected.weights_T, rtol=1e-4)
    num_others = int((~is_near_T | (found.loss_mask_T != expected.loss_mask_T)).sum())
    # A value at a bound may be on one side with graphs, and on the other without.
    if num_others > 0.01 * len(is_near_T):
        raise ArithmeticError(f"compiled and eager weights or masks differ on {num_others} of {len(is_near_T)} tokens")
    if not torch.allclose(found.own_A, expected.own_A, rtol=0.01, atol=0.01):
        raise ArithmeticError("compiled and eager sums for metrics differ")


# The argument must be named ``plan``: _guards_of_call drops torch's checks of it by this name.
def _all_passes(x: Inputs, length_S: Tensor, num_blocks: int, plan: Plan) -> Passed:
    return correct.run_passes(x, Blocks(length_S, len(x.mask_T), num_blocks), plan, None, None)


def _tokens(x: Inputs, length_S: Tensor, num_blocks: int, plan: Plan) -> Tensor:
    return correct.token_pass(x, Blocks(length_S, len(x.mask_T), num_blocks), plan)[1]


def _responses(merged_FS: Tensor, plan: Plan) -> Tensor:
    return correct.response_pass(merged_FS, plan)[1]


def _outputs(x: Inputs, length_S: Tensor, num_blocks: int, sums: tuple[Tensor, ...], plan: Plan) -> Passed:
    blocks = Blocks(length_S, len(x.mask_T), num_blocks)
    s, _ = correct.token_pass(x, blocks, plan)
    r = correct.decide_responses(plan.of_tokens.named(sums[0]), plan)
    return correct.output_pass(s, r, sums, x.mask_T, blocks, plan)


def _compiled(function: Any) -> Callable[..., Any]:
    """A graph for tensors of any sizes."""
    # torch allows 8 graphs per code object, so each graph gets its own code object.
    alone = FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    graph = torch.compile(alone, dynamic=True, fullgraph=True, options={"guard_filter_fn": _guards_of_call})
    return _ANY_SIZES(_FIXED_BOUNDS(graph))  # type: ignore[no-any-return]


def _guards_of_call(guards: Sequence[Any]) -> list[bool]:
    """Select the guards that torch checks in each call: all but the plan, which a graph keeps, and module globals."""
    return [not guard.is_global and "plan" not in guard.name for guard in guards]
