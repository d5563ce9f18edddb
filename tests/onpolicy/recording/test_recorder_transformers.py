# SPDX-License-Identifier: Apache-2.0
"""The recorder on transformers: tables of positions, and continuous batches."""

import importlib.util

import pytest
import torch
from tiny_decoder import padded
from torch import nn

from mis_ext.onpolicy.recording.compare import compare
from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.recordings import Recording
from mis_ext.onpolicy.recording.rows import Rows

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def qwen3(attention: str = "sdpa", theta: float = 1e4):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        **{"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.2, "tie_word_embeddings": False},
        **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    torch.manual_seed(0)
    return Qwen3ForCausalLM._from_config(config, attn_implementation=attention).eval()


def assert_aligned(whole: Recording, pieces: Recording, *, num_rows: int, last_only: tuple[str, ...] = ()) -> None:
    """Every token of every module is there, ids are equal, and numbers differ by float32 rounding only."""
    result = compare(whole, pieces, allow=(*last_only, "*rotary*"))
    assert result.problems == ()
    compared = {module.name: module for module in result.modules}
    assert {"model.embed_tokens", "model.layers.1.self_attn.o_proj", "model.norm", "lm_head", "(model)"} <= {*compared}
    assert {module.num_rows for name, module in compared.items() if name not in ("lm_head", "(model)")} == {num_rows}
    assert compared["model.embed_tokens"].num_differing == 0
    assert compared["model.embed_tokens"].inputs_equal
    # Values are of size 1, and sums of 16 numbers.
    assert max(module.max_abs for module in result.modules) < 1e-5


@needs_transformers
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_continuous_batching_aligns_with_the_whole_forward() -> None:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model, prompts, new = qwen3("paged|eager"), [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]], 4
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(
        **{"page_size": 16, "num_blocks": 8, "max_batch_tokens": 8, "max_requests_per_batch": 2},
        **{"use_cuda_graph": False, "allow_block_sharing": False},
    )
    manager = model.init_continuous_batching(config, batching)
    manager.start()
    sizes, sequence_of = [], {}

    def rows_of(_: nn.Module, __: tuple, kwargs: dict) -> Rows:
        requests = [x.state.request_id for x in manager.batch_processor.inputs_and_outputs.requests_in_batch]
        lengths = kwargs["cu_seq_lens_q"].diff()
        sizes.append(lengths.tolist())
        sequence = torch.tensor([sequence_of[request] for request in requests]).repeat_interleave(lengths)
        return Rows(sequence=sequence, position=kwargs["position_ids"], kept=kwargs.get("logits_to_keep"))

    try:
        with record(model, rows_of=rows_of) as recorder:
            with manager.pause():
                requests = manager.add_requests(prompts, max_new_tokens=new)
                sequence_of = {request: index for index, request in enumerate(requests)}
            outputs = {}
            while len(outputs) < 2 and manager.is_running():
                output = manager.get_result(timeout=60)
                if output is not None and output.is_finished():
                    outputs[output.request_id] = output.generated_tokens
    finally:
        manager.destroy()
    # Several requests in a forward, a prompt in several forwards, and decoding beside a prefill.
    assert len(sizes) > new
    assert any(len(lengths) == 2 and 1 in lengths and max(lengths) > 1 for lengths in sizes)

    # The last token is sampled, but never goes in.
    sequences = [prompt + outputs[request][:-1] for prompt, request in zip(prompts, requests, strict=True)]
    model.set_attn_implementation("sdpa")
    ids, rows = padded(sequences)
    with record(model) as whole, whole.rows(rows):
        model(ids)
    num_rows = sum(map(len, sequences))
    assert_aligned(whole.recording(), recorder.recording(), num_rows=num_rows, last_only=("lm_head", ""))
    logits = recorder.recording().outputs["lm_head"][""]
    first_sampled = [len(prompt) - 1 for prompt in prompts]
    assert [(logits.position_N[logits.sequence_N == s] >= p).sum() for s, p in enumerate(first_sampled)] == [new, new]
    assert logits.values.shape[1:] == (32,)
