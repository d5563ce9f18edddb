# SPDX-License-Identifier: Apache-2.0
"""Experts of a sample for ``--use-rollout-routing-replay``, joined over the requests of its episode.

Row ``p`` has the experts of the forward pass of token ``p``, so a sample of ``T`` tokens has ``T - 1`` rows
``[layers, topk]``: the last token has no forward pass. Tokens that were not sampled have rows too, from the next
request. SGLang returns the rows of the whole sequence for each request, and the frameworks' own functions keep the last
response. If the cache was dropped in between, as after every weight update, the engine has computed the experts of
earlier tokens again, and they may differ from the experts at sampling. So a request asks only for missing rows, and
earlier rows do not change.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from mis_ext.rollout.generation import Contradiction, CountMismatch, Generation, MalformedResponse
from mis_ext.validation import check_choice, check_instance, check_integer, check_mapping

if TYPE_CHECKING:
    from numpy import int32
    from numpy.typing import NDArray

    Rows = NDArray[int32]

FLAG = "use_rollout_routing_replay"
_DTYPES = ("int32", "uint16", "uint8")
# A row of zeros in every layer contains one expert twice. With one expert per token, this many zero rows are not
# chance.
_MOST_ZEROS = 10


def check_replayable(args: Any) -> None:
    """Refuse speculative decoding with a tree: SGLang 0.5.23 moves keys and values of accepted tokens, not experts."""
    algorithm = getattr(args, "sglang_speculative_algorithm", None)
    if not getattr(args, FLAG, False) or not algorithm:
        return
    topk = getattr(args, "sglang_speculative_eagle_topk", None)
    if algorithm == "NGRAM" or topk != 1:
        raise ValueError(
            f"{FLAG} with sglang_speculative_algorithm={algorithm} needs sglang_speculative_eagle_topk=1 (got "
            f"{topk}), and no NGRAM: with a tree of drafts SGLang returns the experts of rejected tokens"
        )


def check_not_retracted(meta_info: Mapping[str, Any]) -> None:
    """Refuse a retracted request. SGLang computes its prefix and the experts again, but not the log-probs.

    See Miles issue 3277. If a server does not count retractions, several weight versions indicate a retraction.
    """
    spans = check_instance("weight_versions", meta_info.get("weight_versions") or [], (list, tuple))
    versions = [*dict.fromkeys(str(check_mapping("weight_versions", span).get("version")) for span in spans)]
    count = meta_info.get("num_retractions")
    count = max(len(versions) - 1, 0) if count is None else check_integer("num_retractions", count, low=0)
    if count > 0:
        by = f" (weight versions {', '.join(versions)})" if len(versions) > 1 else ""
        raise ValueError(
            f"the request was retracted{by}: SGLang computed its experts again, but its log-probs are from the "
            "previous experts; exclude it from the replay, or update weights with pause_generation in mode in_place "
            "or abort"
        )


def decode_experts(encoded: object, dtype: str | None) -> Rows:
    """Decode the base64 experts of an engine: the flat values of SGLang, or vLLM's NumPy file with its shape.

    Args:
        encoded: ``routed_experts`` of a response.
        dtype: SGLang's ``routed_experts_dtype``; None: int32.
    """
    import numpy

    if not isinstance(encoded, str):
        raise TypeError(f"routed_experts must be base64, got {type(encoded).__name__}")
    dtype = "int32" if dtype is None else check_choice("routed_experts_dtype", dtype, _DTYPES)
    try:
        data = base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise ValueError(f"routed_experts is not base64: {error}") from error
    is_file = data.startswith(numpy.lib.format.MAGIC_PREFIX)
    try:
        read: Any = numpy.lib.format.read_array
        found = read(io.BytesIO(data), allow_pickle=False) if is_file else numpy.frombuffer(data, dtype=dtype)
    except (ValueError, EOFError) as error:
        what = "a NumPy file" if is_file else f"a list of {dtype}"
        raise ValueError(f"routed_experts is base64, but not of {what}: {error}") from error
    if found.dtype.name not in _DTYPES:
        raise ValueError(f"routed_experts must be of {', '.join(_DTYPES)}, got {found.dtype}")
    return cast("Rows", found.astype(numpy.int32))


def known_rows(sample: Any) -> list[Rows]:
    """Return the rows of a resumed sample: none before its first token, else those of all forwarded tokens."""
    import numpy

    if not sample.response_length:
        return []
    if sample.rollout_routed_experts is None:
        raise ValueError(f"sample {sample.index} cannot be resumed with {FLAG}: its tokens have no experts")
    rows = numpy.asarray(sample.rollout_routed_experts)
    # Observations at the end had no forward pass yet; their log-probs are 0.
    sampled = [place for place, log_prob in enumerate(sample.rollout_log_probs) if log_prob]
    fed = len(sample.tokens) - sample.response_length + (sampled[-1] if sampled else 0)
    if not fed <= len(rows) < len(sample.tokens):
        raise ValueError(
            f"sample {sample.index} cannot be resumed: its rollout_routed_experts have {len(rows)} rows, but its "
            f"{len(sample.tokens)} tokens need {fed} to {len(sample.tokens) - 1}"
        )
    return [rows]


def read_rows(args: Any, meta_info: Mapping[str, Any], generation: Generation, start: int) -> Rows:
    """``[rows, layers, topk]``, int32: the experts of the tokens from position ``start`` to the second to last.

    ``args``: it reads ``num_layers``, and optionally ``moe_router_topk`` and ``num_experts``. ``start``: the
    ``routed_experts_start_len`` of the request.
    """
    request_id = generation.request_id
    if not meta_info.get("routed_experts"):
        raise MalformedResponse(
            request_id,
            f"meta_info has no routed_experts, which {FLAG} needs: start the engine with "
            "--enable-return-routed-experts (the frameworks do so for their own servers), and SGLang behind a "
            "router that passes return_routed_experts on (Miles' --use-miles-router and PyPI's smg do; PyPI's "
            "sglang-router 0.3.2 does not)",
        )
    if len(set(generation.weight_versions or ())) > 1:
        try:
            check_not_retracted(meta_info)
        except ValueError as error:
            raise Contradiction(request_id, str(error)) from error
    try:
        values = decode_experts(meta_info["routed_experts"], meta_info.get("routed_experts_dtype")).ravel()
    except (TypeError, ValueError) as error:
        raise MalformedResponse(request_id, str(error)) from error
    fed = len(generation.prompt_ids) + len(generation.sampled_ids) - 1
    # Miles' FSDP trainer does not have this argument.
    topk = getattr(args, "moe_router_topk", None) or len(values) // max(1, args.num_layers * (fed - start))
    count, rest = divmod(len(values), args.num_layers * max(1, topk))
    # A server without the start parameter sends all rows. Some versions also have a row for the last token.
    first = {fed - start: 0, fed: start, fed + 1: start}.get(count)
    if rest or first is None:
        raise CountMismatch(
            request_id,
            f"routed_experts has {len(values)} values; num_layers = {args.num_layers} and topk = {topk} with "
            f"{fed + 1} tokens starting at position {start} need {(fed - start) * args.num_layers * topk}",
        )
    rows = values.reshape(count, args.num_layers, topk)[first : first + fed - start]
    unwritten = ~rows.any(axis=(1, 2))
    if unwritten.any() if topk > 1 else unwritten.all() and len(rows) >= _MOST_ZEROS:
        raise MalformedResponse(
            request_id,
            f"routed_experts are 0 in every layer at position {start + int(unwritten.argmax())}: no value was written",
        )
    num_experts = getattr(args, "num_experts", None) or int(rows.max()) + 1
    if rows.min() < 0 or rows.max() >= num_experts:
        raise MalformedResponse(
            request_id, f"routed_experts must be in [0, {num_experts}), got {int(rows.min())} to {int(rows.max())}"
        )
    return rows


def join_rows(args: Any, sample: Any, parts: Sequence[Rows]) -> Any:
    """The rows of a sample in the type of its framework: tensors in slime, arrays in Miles."""
    import numpy

    if not parts:
        raise ValueError(
            f"sample {sample.index} has no room for a token, so the engine chose no experts, which {FLAG} needs for "
            "every sample: exclude such prompts (rollout_max_prompt_len)"
        )
    shapes = sorted({part.shape[1:] for part in parts})
    if len(shapes) > 1:
        raise ValueError(
            f"sample {sample.index}: its requests differ in the layers and topk of their experts: {shapes}"
        )
    rows = numpy.concatenate(parts)
    if not hasattr(sample, "append_response_tokens"):
        return rows
    import torch

    return torch.from_numpy(rows)
