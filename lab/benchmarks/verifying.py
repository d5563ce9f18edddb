# SPDX-License-Identifier: Apache-2.0
"""Nothing is timed before it is right: every contender against the float64 judges of the tests, on smaller inputs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from workload import Responses, Shape, World, draw, hook_item

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

import host_loop
import reference
import zigzag

MAX_TOKENS = 20_000
# Distance of every log ratio from every bound, far above what float32 may shift it by.
MIN_MARGIN = 1e-6
MAX_DRAWS = 20
# One float32 `exp` at up to 20 and a few means after it; k3 and chi-square are differences of numbers near 1.
RTOL, ATOL = 1e-5, 2e-6
SAME_RTOL, SAME_ATOL = 1e-6, 1e-7

HookOutput = tuple[Tensor, list[Tensor], dict[str, Tensor]]
Hook = Callable[..., HookOutput]


class Unequal(Exception):
    """A contender's numbers are wrong; the message says where."""


class Judged:
    """One smaller micro-batch per data-parallel rank with its float64 reference."""

    def __init__(self, shape: Shape, keys: Mapping[str, Any], *, world: World, seed: int) -> None:
        self.world, self.keys = world, keys
        small = shape.scaled(MAX_TOKENS // world.dp_size)
        for attempt in range(MAX_DRAWS):
            calls = [draw(small, seed=seed + attempt * world.dp_size + rank) for rank in range(world.dp_size)]
            judged = reference.correct([_samples(responses) for responses in calls], keys)
            if min(expected.margin for expected in judged) > MIN_MARGIN:
                break
        else:
            raise Unequal(f"no random input kept its distance from the bounds of {keys}")
        self.responses, self.expected = calls[world.dp_rank], judged[world.dp_rank]
        self.own = _own_tokens(self.responses, world)
        self.response = self.responses.mask[self.own] != 0

    def check_package(self, hook: Hook, args: Namespace, *, name: str) -> None:
        """A hook of the package against ``tests/support/reference.py``, twice: the first call is special."""
        expected = self.expected
        for _ in range(2):
            loss, masks, metrics = hook(args, **self._item())
            if self.keys.get("use_tis"):
                weights = _flat(expected.weights)
                self._close(f"{name}: loss", loss, weights * self.responses.pg_loss.double())
                _identical(f"{name}: masks", torch.cat(masks), _flat(expected.masks))
            else:
                self._passed_through(name, loss, masks)
            if missing := set(metrics) - set(expected.tokens):
                raise Unequal(f"{name}: metrics that the judge does not know: {sorted(missing)}")
            for metric, values in metrics.items():
                if expected.values[metric] == expected.values[metric]:
                    self._close(f"{name}: {metric}", values, _flat(expected.tokens[metric]), on_response=True)

    def check_baseline(self, hook: Hook, args: Namespace) -> None:
        """The per-sample loop against ``tests/support/host_loop.py``."""
        samples = _samples(self.responses)
        expected = host_loop.correct(self.keys, train=samples.train, rollout=samples.rollout, masks=samples.masks)
        loss, masks, metrics = hook(args, **self._item())
        if self.keys.get("use_tis"):
            weights = torch.cat(expected.weights)
            self._close("baseline: loss", loss, weights * self.responses.pg_loss.double())
            _identical("baseline: masks", torch.cat(masks), torch.cat(expected.masks))
        else:
            self._passed_through("baseline", loss, masks)
        if set(metrics) != set(expected.metrics):
            raise Unequal(f"baseline: metrics {sorted(set(metrics) ^ set(expected.metrics))} are missing or too many")
        for metric, values in metrics.items():
            self._close(f"baseline: {metric}", values, torch.cat(expected.metrics[metric]), on_response=True)

    def _item(self) -> dict[str, Any]:
        return hook_item(self.responses.to(self.world.device), self.world)

    def _passed_through(self, name: str, loss: Tensor, masks: Sequence[Tensor]) -> None:
        _identical(f"{name}: loss", loss, self.responses.pg_loss[self.own])
        _identical(f"{name}: masks", torch.cat([*masks]), self.responses.mask)

    def _close(self, what: str, local: Tensor, whole: Tensor, *, on_response: bool = False) -> None:
        """Local tokens against the whole responses; outside the response a metric may be any finite number."""
        found, wanted = local.detach().cpu(), whole[self.own]
        if on_response:
            found, wanted = found[self.response], wanted[self.response]
        assert_close(what, found, wanted, rtol=RTOL, atol=ATOL)


def check_same(name: str, output: Any, other: Any, *, rtol: float = SAME_RTOL, atol: float = SAME_ATOL) -> None:
    """Two results on the same inputs: decisions are identical, numbers differ by rounding."""
    found, expected = _leaves(output), _leaves(other)
    if found.keys() != expected.keys():
        raise Unequal(f"{name}: outputs {sorted(found.keys() ^ expected.keys())} are missing or too many")
    for path, value in found.items():
        wanted = expected[path]
        if path == "masks":
            _identical(f"{name}: {path}", value, wanted)
        else:
            assert_close(f"{name}: {path}", value.detach(), wanted.detach(), rtol=rtol, atol=atol)


def assert_close(what: str, found: Tensor, wanted: Tensor, *, rtol: float, atol: float) -> None:
    """Equality but for rounding, NaN equal to NaN."""
    if found.shape != wanted.shape:
        raise Unequal(f"{what} has shape {tuple(found.shape)}, not {tuple(wanted.shape)}")
    found, wanted = found.double(), wanted.double()
    close = torch.isclose(found, wanted, rtol=rtol, atol=atol, equal_nan=True)
    if not close.all():
        worst = int((found - wanted).abs().where(~close, -1.0).nan_to_num(torch.inf).argmax())
        pair = f"{found.flatten()[worst].item():.9g} instead of {wanted.flatten()[worst].item():.9g}"
        raise Unequal(f"{what}: {pair} at {worst}; {int((~close).sum())} of {close.numel()} differ")


def _identical(what: str, found: Tensor, wanted: Tensor) -> None:
    assert_close(what, found.detach().cpu(), wanted.cpu(), rtol=0.0, atol=0.0)


def _leaves(output: Any) -> dict[str, Tensor]:
    """The tensors of a hook's or of the pipeline's output by name."""
    loss, masks, metrics = output
    masks = torch.cat([*masks]) if isinstance(masks, list) else masks
    return {"loss or weights": loss, "masks": masks, **metrics}


def _samples(responses: Responses) -> reference.Samples:
    return reference.Samples(*(responses.split(x) for x in (responses.train, responses.rollout, responses.mask)))


def _own_tokens(responses: Responses, world: World) -> Tensor:
    """Places of this rank's tokens in the packed whole responses."""
    out, offset = [], 0
    for total, length in zip(responses.total_lengths, responses.response_lengths, strict=True):
        local = zigzag.local_tokens(
            total_length=total, response_length=length, cp_rank=world.cp_rank, cp_size=world.cp_size
        )
        out.append(torch.tensor(local, dtype=torch.long) + offset)
        offset += length
    return torch.cat(out)


def _flat(values: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor([x for value in values for x in value], dtype=torch.float64)
