# SPDX-License-Identifier: Apache-2.0
"""The experts of an engine per token and layer, as SGLang and vLLM send them.

Row ``p`` has the experts of the forward pass of the token at position ``p``, which affect the log-prob of the token at
``p + 1``. The last sampled token has no forward pass, so the last row has no experts. Only mixture-of-experts layers
have a column.

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
    """The experts of an engine for every token of one sample.

    Attributes:
        experts_TLK: Expert indices of ``T`` tokens (prompt and response), ``L`` mixture-of-experts layers and ``K``
            choices; the whole row is -1 if a token was not recorded. int16, int32 or int64.
        num_experts: Experts per layer.

    Raises:
        TypeError: It is not a tensor, the dtype is not one of these, or ``num_experts`` is not an integer.
        ValueError: The shape is not ``[T, L, K]``, an index is out of range, a token has a duplicate expert in a layer,
            or a token's row is only partly recorded.
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
            raise ValueError(f"token {token} is only partly recorded: {experts_TLK[token].tolist()}")
        ordered_TLK = experts_TLK.sort(-1).values
        repeated_TLK = (ordered_TLK[..., 1:] == ordered_TLK[..., :-1]) & recorded_TLK[..., 1:]
        if repeated_TLK.any():
            where, value = _first(repeated_TLK, ordered_TLK[..., 1:])
            raise ValueError(
                f"expert {value} is chosen twice at {where}, as in dense layers or rows that the engine did not write"
            )

    @property
    def num_tokens(self) -> int:
        """``T``, tokens of prompt and response."""
        return len(self.experts_TLK)

    @property
    def recorded_T(self) -> Tensor:
        """``[T]`` bool: tokens with recorded experts."""
        return self.experts_TLK[:, 0, 0] != NOT_RECORDED

    @classmethod
    def from_rows(cls, rows_NLK: Tensor, *, num_tokens: int, num_experts: int, start: int = 0) -> RoutedExperts:
        """A sample of ``num_tokens`` tokens with ``R`` recorded rows starting at position ``start``.

        Raises:
            TypeError: See the class.
            ValueError: The rows do not fit, or see the class.
        """
        _check_tensor("rows_NLK", rows_NLK)
        num_tokens, start = check_integer("num_tokens", num_tokens), check_integer("start", start)
        if not 0 <= start <= start + len(rows_NLK) <= num_tokens:
            raise ValueError(f"{len(rows_NLK)} rows starting at position {start} do not fit into {num_tokens} tokens")
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
        """Read the experts from SGLang for one sample with ``return_routed_experts``.

        SGLang 0.5 sends base64 of row-major ``[rows, num_layers, topk]``: the positions from
        ``routed_experts_start_len`` (0 by default) to the second to last token, including the prompt, also with a
        cached prefix. Its layers are all decoder layers; dense layers have zeros. Unwritten values are zeros too, which
        with ``topk`` 1 could also be expert 0. So with ``topk`` 1 a token with zeros in every layer counts as not
        recorded.

        Args:
            meta_info: ``meta_info`` of the response.
            num_tokens: Tokens of prompt and response.
            num_layers: All decoder layers of the model, including dense layers.
            topk: Experts per token.
            num_experts: Experts per layer.
            moe_layers: The indices of the mixture-of-experts layers among the decoder layers, ascending from 0; by
                default all.

        Raises:
            TypeError: ``meta_info`` is not a mapping, its ``routed_experts`` not a string, or a count not an integer.
            ValueError: Experts are missing or not base64, the number of values does not fit ``num_tokens``, every value
                is 0, the request was retracted, ``moe_layers`` omits a layer with experts; or see the class.
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
        # Some versions also have a row for the last token.
        if rest or start + rows not in (num_tokens - 1, num_tokens):
            raise ValueError(
                f"routed_experts has {len(values)} values: with num_layers = {num_layers} and topk = {topk} that is "
                f"{len(values) / (num_layers * topk):g} rows starting at position {start}, but num_tokens = "
                f"{num_tokens} needs {num_tokens - 1 - start}"
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
        """Read the experts from vLLM for one sample with ``--enable-return-routed-experts``.

        vLLM 0.32 sends base64 of a NumPy file ``[rows, layers, topk]``: the positions from the request's
        ``routed_experts_prompt_start`` to the second to last token, including the prompt. Its layers are all decoder
        layers; dense layers and unwritten values are zeros: see :meth:`from_sglang`.

        ``choice`` is a choice of the response, ``start`` the request's ``routed_experts_prompt_start``. ``num_tokens``,
        ``num_experts``, and ``moe_layers`` are those of :meth:`from_sglang`.

        Raises:
            TypeError: ``choice`` is not a mapping, its ``routed_experts`` not a string, or a count not an integer.
            ValueError: Experts are missing or not a NumPy file, the rows do not fit ``num_tokens``, every value is 0,
                ``moe_layers`` omits a layer with experts; or see the class.
        """
        num_tokens, start = check_integer("num_tokens", num_tokens), check_integer("start", start)
        _check_fields("choice", choice, "start vLLM with --enable-return-routed-experts")
        rows_NLK = torch.from_numpy(decode_experts(choice["routed_experts"], None))
        if rows_NLK.dim() != 3:
            raise ValueError(f"routed_experts must be a NumPy file of [rows, layers, topk], got {[*rows_NLK.shape]}")
        if start + len(rows_NLK) != num_tokens - 1:
            raise ValueError(
                f"routed_experts has {len(rows_NLK)} rows starting at position start = {start}, but num_tokens = "
                f"{num_tokens} needs {num_tokens - 1 - start}"
            )
        rows_NLK = _moe_rows(rows_NLK, moe_layers)
        return cls.from_rows(rows_NLK, num_tokens=num_tokens, num_experts=num_experts, start=start)


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}: use torch.tensor(...)")


def _moe_rows(rows_NLK: Tensor, moe_layers: Sequence[int] | None) -> Tensor:
    """The rows of the mixture-of-experts layers; with ``topk`` 1, -1 if expert 0 looks like no record.

    The engines' buffers are initially zero, and stay zero in dense layers and unwritten rows. With ``topk`` 2 or more,
    unwritten zeros are a duplicate expert, which :class:`RoutedExperts` refuses.
    """
    num_layers = rows_NLK.size(1)
    layers = [check_integer("moe_layers", layer) for layer in (range(num_layers) if moe_layers is None else moe_layers)]
    if not layers or layers != sorted({*layers} & {*range(num_layers)}):
        raise ValueError(f"moe_layers must be ascending layers in [0, {num_layers}), each once, got {layers}")
    dense = [layer for layer in range(num_layers) if layer not in layers]
    if rows_NLK[:, dense].any():
        layer = next(layer for layer in dense if rows_NLK[:, layer].any())
        raise ValueError(f"layer {layer} has experts, so it is not a dense layer, but moe_layers = {layers} omits it")
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
