# SPDX-License-Identifier: Apache-2.0
"""A tool call that an agent parses and writes again, as token ids: what a trainer gets from text, and from mis_ext."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from evidence.pictures import save
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from tiny_tokenizers import TURN_END, encode, english_tokenizer, render

from mis_ext.rollout import build_samples
from mis_ext.rollout.generation import Generation

USER = {"role": "user", "content": "What is the weather in Paris?"}
CALL = '{"city":"Paris"}'
RESULT = {"role": "tool", "content": "mild"}
ANSWER = "The weather is mild."


class Kind(NamedTuple):
    """How a token stands to what was sampled: face, line and line width of its box, and the words of the legend."""

    face: str
    line: str
    width: float
    meaning: str


# Of Okabe and Ito, light enough for black text; the lines tell them apart in gray.
EXACT = Kind("#56B4E9", "-", 0.8, "as sampled, behind the same ids")
SHIFTED = Kind("#F5DF6E", "--", 1.6, "its log-prob is of another context")
NEVER = Kind("#EE9A5C", "-", 3.0, "nobody sampled this id")
PROMPT = Kind("#E8E8E8", "-", 0.8, "prompt: not trained")

WIDTH, HEIGHT, GAP, ROW = 1.0, 1.1, 0.1, 2.1


class Box(NamedTuple):
    """A token, or several in one box."""

    kind: Kind
    text: str
    token_id: str


def conversation() -> dict[str, list[Box]]:
    """A conversation of two calls, as sampled, tokenized from its text, and as the samples of ``split``."""
    tokenizer = english_tokenizer()
    first, second = _two_calls(tokenizer)
    built = build_samples([first, second], policy="split", tokenizer=tokenizer)
    # The agent's tokens of the first turn are in the prompt of the second.
    start, ids = len(first.prompt_ids), second.prompt_ids
    end = ids.index(tokenizer.eos_token_id, start) + 1
    rest = [Box(PROMPT, "result", f"{len(ids) - end} ids"), Box(EXACT, "turn 2", f"{len(second.sampled_ids)} ids")]
    rows = {
        "what the engine sampled in call 1": _boxes(tokenizer, first.prompt_ids + first.sampled_ids, first),
        "trained from the text that an agent kept": [*_boxes(tokenizer, ids[:end], first), *rest],
    }
    for number, (sample, call) in enumerate(zip(built.samples, (first, second), strict=True), start=1):
        rows[f"trained with mis_ext, sample {number} of {len(built.samples)}"] = _boxes(tokenizer, sample.tokens, call)
    return rows


def draw_tokens(path: Path) -> None:
    """Draw them, a row of boxes each."""
    rows = conversation()
    figure, axis = plt.subplots(figsize=(7, 5), constrained_layout=True)
    for number, (title, boxes) in enumerate(rows.items()):
        _draw_row(axis, -number * ROW, title, boxes)
    handles = [_rectangle((0, 0), WIDTH, kind, label=kind.meaning) for kind in (EXACT, NEVER, SHIFTED, PROMPT)]
    axis.set(xlim=(-0.1, 12.9), ylim=(-len(rows) * ROW - 0.9, 1.0))
    legend = {"ncols": 2, "columnspacing": 0.6, "handlelength": 1.6, "handletextpad": 0.5, "borderpad": 0}
    axis.legend(handles=handles, loc="lower left", fontsize=12, frameon=False, **legend)
    axis.axis("off")
    save(figure, path)


def _two_calls(tokenizer: Any) -> tuple[Generation, Generation]:
    """The agent keeps the parsed JSON, so that the second prompt has it as Python writes it."""
    repeated = {"role": "assistant", "content": json.dumps(json.loads(CALL))}
    return (
        _call(tokenizer, "first", render(tokenizer, [USER]), CALL),
        _call(tokenizer, "second", render(tokenizer, [USER, repeated, RESULT]), ANSWER),
    )


def _call(tokenizer: Any, name: str, prompt: list[int], text: str) -> Generation:
    ids = encode(tokenizer, text + TURN_END)
    return Generation(
        request_id=name,
        prompt_ids=prompt,
        sampled_ids=ids,
        log_probs=[-1.0] * len(ids),
        finish_reason="stop",
        weight_version=None,
    )


def _boxes(tokenizer: Any, ids: list[int], call: Generation) -> list[Box]:
    """A prompt and a turn: how does each token of the turn stand to what the call sampled there?"""
    start, sampled = len(call.prompt_ids), call.prompt_ids + call.sampled_ids
    boxes = [Box(PROMPT, "prompt", f"{start} ids")]
    for place, token_id in enumerate(ids[start:], start=start):
        kind = NEVER if token_id != sampled[place] else EXACT if ids[:place] == sampled[:place] else SHIFTED
        text = tokenizer.decode([token_id])
        boxes.append(Box(kind, "end" if text == TURN_END else text.replace(" ", "·"), str(token_id)))
    return boxes


def _draw_row(axis: Axes, top: float, title: str, boxes: Sequence[Box]) -> None:
    axis.text(0, top + 0.22, title, fontsize=13, fontweight="bold", va="bottom")
    place = 0.0
    for box in boxes:
        width = max(WIDTH, 0.2 + 0.215 * len(box.text))
        axis.add_patch(_rectangle((place, top - HEIGHT), width, box.kind))
        axis.text(place + width / 2, top - 0.3, box.text, fontsize=12, ha="center", va="center", family="monospace")
        axis.text(place + width / 2, top - 0.8, box.token_id, fontsize=12, ha="center", va="center")
        place += width + GAP


def _rectangle(corner: tuple[float, float], width: float, kind: Kind, label: str = "") -> Rectangle:
    style = {"facecolor": kind.face, "edgecolor": "black", "linestyle": kind.line, "linewidth": kind.width}
    return Rectangle(corner, width, HEIGHT, label=label, **style)
