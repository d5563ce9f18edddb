# SPDX-License-Identifier: Apache-2.0
"""The experts that an engine chose per token and layer: as SGLang and vLLM send them.

Row ``p`` belongs to the token at position ``p`` as the model's input: it is the choice made while that token was fed
forward, and it shapes the log-prob of the token at ``p + 1``. A sampled token that ends the sample is never fed
forward, so the last row has no choice. Mixture-of-experts layers only; dense layers have no column.

Rollout routing replay (R3): "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv 2510.11370.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mis_ext.rollout.custom_generate.routed_experts import check_not_retracted, decode_experts
from mis_ext.validation import check_integer

NOT_RECORDED = -1
_DTYPES = (torch.int16, torch.int32, torch.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class RoutedExperts:
    """The experts that an engine chose for every token of one sample.

    Attributes:
        experts_TLK: Expert indices of ``T`` tokens (prompt and response), ``L`` mixture-of-experts layers and ``K``
            choices; -1 in the whole row of a token that was not recorded. int16, int32 or int64.
        num_experts: Experts per layer.

    Raises:
        TypeError: It is no tensor, the dtype is none of these, or ``num_experts`` is no integer.
        ValueError: The shape is not ``[T, L, K]``, an index is out of range, a token has an expert twice in a layer, or
            only a part of a token's row is recorded.
    """

    experts_TLK: Tensor
    num_experts: int

    def __post_init__(self) -> None:
        experts_TLK = self.experts_TLK
        check_integer("num_experts", self.num_experts, low=1)
        _check_tensor("experts_TLK", experts_TLK)
        if experts_TLK.dtype not in _DTYPES:
            raise TypeError(f"experts_TLK must be int16, int32 or int64, got {experts_TLK.dtype}")
        if experts_TLK.dim() != 3 or 0 in experts_TLK.shape:
            raise ValueError(f"experts_TLK must be [tokens, layers, topk], none of them 0, got {[*experts_TLK.shape]}")
        legal_TLK = (experts_TLK >= NOT_RECORDED) & (experts_TLK < self.num_experts)
        if not legal_TLK.all():
            where, value = _first(~legal_TLK, experts_TLK)
            raise ValueError(f"expert {value} at {where} is outside [0, {self.num_experts}) and not -1 (not recorded)")
        recorded_TLK = experts_TLK != NOT_RECORDED
        partial_T = recorded_TLK.flatten(1).any(1) & ~recorded_TLK.flatten(1).all(1)
        if partial_T.any():
            token = int(partial_T.nonzero()[0])
            raise ValueError(f"token {token} is recorded in part only: {experts_TLK[token].tolist()}")
        ordered_TLK = experts_TLK.sort(-1).values
        repeated_TLK = (ordered_TLK[..., 1:] == ordered_TLK[..., :-1]) & recorded_TLK[..., 1:]
        if repeated_TLK.any():
            where, value = _first(repeated_TLK, ordered_TLK[..., 1:])
            raise ValueError(
                f"expert {value} is chosen twice at {where}: dense layers or unwritten rows of the engine?"
            )

    @property
    def num_tokens(self) -> int:
        """``T``, tokens of prompt and response."""
        return len(self.experts_TLK)

    @property
    def recorded_T(self) -> Tensor:
        """``[T]`` bool: tokens for which the engine recorded its experts."""
        return self.experts_TLK[:, 0, 0] != NOT_RECORDED

    @classmethod
    def from_rows(cls, rows_NLK: Tensor, *, num_tokens: int, num_experts: int, start: int = 0) -> RoutedExperts:
        """A sample of ``num_tokens`` tokens of which the ``R`` from position ``start`` on are recorded.

        Raises:
            TypeError: See the class.
            ValueError: The rows do not fit in, or see the class.
        """
        _check_tensor("rows_NLK", rows_NLK)
        num_tokens, start = check_integer("num_tokens", num_tokens), check_integer("start", start)
        if not 0 <= start <= start + len(rows_NLK) <= num_tokens:
            raise ValueError(f"{len(rows_NLK)} rows from position {start} on do not fit into {num_tokens} tokens")
        experts_TLK = rows_NLK.new_full((num_tokens, *rows_NLK.shape[1:]), NOT_RECORDED)
        experts_TLK[start : start + len(rows_NLK)] = rows_NLK
        return cls(experts_TLK=experts_TLK, num_experts=num_experts)

    @classmethod
    def from_sglang(
        cls,
        meta_info: Mapping[str, Any],
        *,
        num_tokens: int,
        num_layers: int,
        topk: int,
        num_experts: int,
        moe_layers: Sequence[int] | None = None,
    ) -> RoutedExperts:
        """Read the experts that SGLang returns for one sample with ``return_routed_experts``.

        SGLang 0.5 sends base64 of row-major ``[rows, num_layers, topk]``: the positions from
        ``routed_experts_start_len`` (0 unless asked otherwise) to the last but one token, prompt included, also where a
        prefix was cached. Its layers are all decoder layers; dense ones hold zeros. So does what was not written, which
        with ``topk`` 1 could as well be expert 0: a token with zeros in every layer counts as not recorded then.

        Args:
            meta_info: ``meta_info`` of the response.
            num_tokens: Tokens of prompt and response.
            num_layers: All decoder layers of the model, dense ones included.
            topk: Experts per token.
            num_experts: Experts per layer.
            moe_layers: Which of the decoder layers are mixture-of-experts layers, ascending from 0; by default all.

        Raises:
            TypeError: ``meta_info`` is no mapping, its ``routed_experts`` no string, or a count no integer.
            ValueError: Nothing was returned, it is no base64, the number of values does not fit ``num_tokens``, every
                value is 0, the request was retracted, ``moe_layers`` omits a layer with experts; or see the class.
        """
        num_layers, topk = check_integer("num_layers", num_layers, low=1), check_integer("topk", topk, low=1)
        num_tokens = check_integer("num_tokens", num_tokens)
        _check_fields(
            "meta_info",
            meta_info,
            "start SGLang with --enable-return-routed-experts and send return_routed_experts: true",
        )
        check_not_retracted(meta_info)
        decoded = decode_experts(meta_info["routed_experts"], meta_info.get("routed_experts_dtype"))
        values, start = torch.from_numpy(decoded).flatten(), meta_info.get("routed_experts_start_len")
        start = check_integer("routed_experts_start_len", 0 if start is None else start, low=0)
        rows, rest = divmod(len(values), num_layers * topk)
        # Some versions feed the last token forward too.
        if rest or start + rows not in (num_tokens - 1, num_tokens):
            raise ValueError(
                f"routed_experts has {len(values)} values: with num_layers = {num_layers} and topk = {topk} that is "
                f"{len(values) / (num_layers * topk):g} rows from position {start} on, and num_tokens = {num_tokens} "
                f"needs {num_tokens - 1 - start}"
            )
        rows_NLK = _moe_rows(values.view(rows, num_layers, topk), moe_layers)
        return cls.from_rows(rows_NLK, num_tokens=num_tokens, num_experts=num_experts, start=start)

    @classmethod
    def from_vllm(
        cls,
        choice: Mapping[str, Any],
        *,
        num_tokens: int,
        num_experts: int,
        start: int = 0,
        moe_layers: Sequence[int] | None = None,
    ) -> RoutedExperts:
        """Read the experts that vLLM returns for one sample with ``--enable-return-routed-experts``.

        vLLM 0.32 sends base64 of a NumPy file ``[rows, layers, topk]``: the positions from the request's
        ``routed_experts_prompt_start`` to the last but one token, prompt included. Its layers are all decoder layers;
        dense ones hold zeros, and so does what was not written: see :meth:`from_sglang`.

        ``choice`` is a choice of the response, ``start`` the request's ``routed_experts_prompt_start``. ``num_tokens``,
        ``num_experts``, and ``moe_layers`` are those of :meth:`from_sglang`.

        Raises:
            TypeError: ``choice`` is no mapping, its ``routed_experts`` no string, or a count no integer.
            ValueError: Nothing was returned, it is no NumPy file of experts, its rows do not fit ``num_tokens``, every
                value is 0, ``moe_layers`` omits a layer with experts; or see the class.
        """
        num_tokens, start = check_integer("num_tokens", num_tokens), check_integer("start", start)
        _check_fields("choice", choice, "start vLLM with --enable-return-routed-experts")
        rows_NLK = torch.from_numpy(decode_experts(choice["routed_experts"], None))
        if rows_NLK.dim() != 3:
            raise ValueError(f"routed_experts must be a NumPy file of [rows, layers, topk], got {[*rows_NLK.shape]}")
        if start + len(rows_NLK) != num_tokens - 1:
            raise ValueError(
                f"routed_experts has {len(rows_NLK)} rows from position start = {start} on, and num_tokens = "
                f"{num_tokens} needs {num_tokens - 1 - start}"
            )
        rows_NLK = _moe_rows(rows_NLK, moe_layers)
        return cls.from_rows(rows_NLK, num_tokens=num_tokens, num_experts=num_experts, start=start)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}: torch.tensor(...) makes one")


def _moe_rows(rows_NLK: Tensor, moe_layers: Sequence[int] | None) -> Tensor:
    """The rows of the mixture-of-experts layers, -1 where with one choice nothing tells expert 0 from no record.

    The engines' buffers begin as zeros, which stay in dense layers and where nothing is written. With two choices a
    zero that nobody wrote is an expert chosen twice, which :class:`RoutedExperts` refuses.
    """
    num_layers = rows_NLK.size(1)
    layers = [check_integer("moe_layers", layer) for layer in (range(num_layers) if moe_layers is None else moe_layers)]
    if not layers or layers != sorted({*layers} & {*range(num_layers)}):
        raise ValueError(f"moe_layers must be ascending layers in [0, {num_layers}), each once, got {layers}")
    dense = [layer for layer in range(num_layers) if layer not in layers]
    if rows_NLK[:, dense].any():
        layer = next(layer for layer in dense if rows_NLK[:, layer].any())
        raise ValueError(f"layer {layer} has experts, so it is no dense layer: moe_layers = {layers} leaves it out")
    rows_NLK = rows_NLK[:, layers]
    if len(rows_NLK) and not rows_NLK.any():
        raise ValueError("every expert in routed_experts is 0: the engine's MoE backend recorded nothing")
    if rows_NLK.size(-1) > 1:
        return rows_NLK
    return torch.where(rows_NLK.any(1, keepdim=True), rows_NLK, NOT_RECORDED)


def _first(where_TLK: Tensor, values_TLK: Tensor) -> tuple[str, int]:
    token, layer, choice = where_TLK.nonzero()[0].tolist()
    return f"token {token}, layer {layer}", int(values_TLK[token, layer, choice])


def _check_fields(name: str, fields: Mapping[str, Any], advice: str) -> None:
    """Raise an error if an engine's response has no ``routed_experts``."""
    if not isinstance(fields, Mapping):
        raise TypeError(
            f"{name} must be a mapping, got {type(fields).__name__}: RoutedExperts.from_rows(torch.tensor(rows), ...) "
            "takes lists"
        )
    if not fields.get("routed_experts"):
        raise ValueError(f"{name} has no routed_experts: {advice}")
