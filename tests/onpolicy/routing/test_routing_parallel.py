# SPDX-License-Identifier: Apache-2.0
"""Routing replay over real gloo processes: every rank replays its rows, and the ranks together score as one.

The weights, the experts and the log-probs of one process are written down; four processes replay the same experts under
two topologies and write down what their routers used and what they scored.
"""

# The imports after the skip need packages that only the example's environment has.
# ruff: noqa: E402

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from process_ranks import run_processes
from replayed_model import router_outputs, used_experts
from torch import Tensor

for needed in ("megatron", "transformers"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} not installed (requirements/example.txt)", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

with warnings.catch_warnings():
    # Megatron-Core reports at import that Transformer Engine and Apex are not installed.
    warnings.simplefilter("ignore")
    from grpo.layout import ModelInputs, build_inputs
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from toy_moe import MoEShape, build_trainer, megatron_processes, single_process

from mis_ext.onpolicy.routing.experts import RoutedExperts
from mis_ext.onpolicy.routing.replay import replay_routing
from mis_ext.onpolicy.routing.routing_layout import RoutingLayout

pytestmark = [
    pytest.mark.distributed,
    # Four processes of Megatron-Core; test_routing_replay.py has the rules in one.
    pytest.mark.whole_run,
    # Of Megatron-Core itself, at every projection.
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),
]

WORLD_SIZE = 4
TOPOLOGIES: dict[str, dict[str, int]] = {
    "CP 2 x TP 2 x EP 2": {
        "context_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "PP 2 x DP 2": {"pipeline_model_parallel_size": 2},
}
PADDED_LENGTHS = {"packed": None, "padded": 20}
SHAPE = MoEShape(num_layers=4, hidden_size=32, expert_size=16, num_experts=8, topk=2, vocab_size=64)
# The first pipeline stage holds one mixture of experts, the second one two.
MOE_LAYERS = [1, 0, 1, 1]
LENGTHS = [7, 16, 4, 9]
NO_REPLAY = "no replay"


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(SHAPE.vocab_size, (length,), generator=generator) for length in LENGTHS]


def given_experts() -> list[RoutedExperts]:
    """Any experts, for all tokens but the last."""
    generator = torch.Generator().manual_seed(1)
    orders = [torch.rand(n - 1, sum(MOE_LAYERS), SHAPE.num_experts, generator=generator).argsort(-1) for n in LENGTHS]
    return [
        RoutedExperts.from_rows(order[..., : SHAPE.topk], num_tokens=length, num_experts=SHAPE.num_experts)
        for order, length in zip(orders, LENGTHS, strict=True)
    ]


def build(**sizes: int) -> GPTModel:
    """This rank's part of the model, with weights of its own."""

    def torch_norm(_: type, *, config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.RMSNorm:
        return torch.nn.RMSNorm(hidden_size, eps)

    settings = {"pipeline_dtype": torch.float32, "sequence_parallel": "tensor_model_parallel_size" in sizes, **sizes}
    # Without Transformer Engine, Megatron-Core's norm is torch's and refuses sequence parallelism: its gradients would
    # not be summed over the ranks. The forward pass is right.
    with patch.object(WrappedTorchNorm, "__new__", torch_norm):
        return build_trainer(SHAPE, seed=0, moe_layer_freq=MOE_LAYERS, **settings)


def part_of(whole: dict[str, Tensor], model: GPTModel) -> dict[str, Tensor]:
    """This rank's part of one process' weights, under this rank's names."""
    first_layer = parallel_state.get_pipeline_model_parallel_rank() * len(model.decoder.layers)
    tp_rank, tp_size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    num_local_experts = SHAPE.num_experts // parallel_state.get_expert_model_parallel_world_size()
    first_expert = parallel_state.get_expert_model_parallel_rank() * num_local_experts
    out = {}
    for name, parameter in model.named_parameters():
        words = name.split(".")
        for key, first in (("layers", first_layer), ("local_experts", first_expert)):
            if key in words:
                index = words.index(key) + 1
                words[index] = str(int(words[index]) + first)
        weight = whole[".".join(words)]
        if parameter.shape != weight.shape:
            # The gate's and the up projection's rows are cut apart.
            blocks = 2 if "linear_fc1" in words else 1
            (dim,) = (dim for dim in range(2) if parameter.shape[dim] != weight.shape[dim])
            pieces = [block.chunk(tp_size, dim)[tp_rank] for block in weight.chunk(blocks, dim)]
            weight = torch.cat(pieces, dim)
        out[name] = weight
    return out


def score(model: GPTModel, inputs: ModelInputs) -> Tensor | None:
    """The log-probs of this rank's targets, on the last pipeline stage."""
    tp_size = parallel_state.get_tensor_model_parallel_world_size()
    batch, length = inputs.tokens.shape
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(length // tp_size, batch, SHAPE.hidden_size)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    out = model(inputs.tokens, inputs.positions, None, packed_seq_params=inputs.packed_seq_params)
    if not parallel_state.is_pipeline_last_stage():
        dist.send(out, parallel_state.get_pipeline_model_parallel_next_rank())
        return None
    logits_RV = out.flatten(0, 1)[inputs.logit_index_R]
    return logits_RV.log_softmax(-1).gather(-1, inputs.target_R[:, None]).squeeze(-1)


@torch.no_grad()
def replay(model: GPTModel, padded_length: int | None, mine: range) -> dict[str, Any]:
    """Replay the experts of ``mine`` among the samples: what this rank's routers used, and what it scored."""
    cp = {
        "cp_rank": parallel_state.get_context_parallel_rank(),
        "cp_size": parallel_state.get_context_parallel_world_size(),
    }
    tp = {
        "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
        "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
    }
    tokens, experts = ([column[index] for index in mine] for column in (samples(), given_experts()))
    lengths = [len(sample) for sample in tokens]
    inputs = build_inputs(
        tokens,
        [length - 1 for length in lengths],
        max_seq_lens=None if padded_length is None else [padded_length] * len(tokens),
        device=torch.device("cpu"),
        **cp,
    )
    if padded_length is None:
        layout = RoutingLayout.packed(lengths, **cp, **tp)
    else:
        layout = RoutingLayout.padded(lengths, padded_length=padded_length, **cp, **tp)
    with router_outputs(model) as seen, replay_routing(model, [layout.local(experts)]):
        log_probs = score(model, inputs)
    used_TLK = torch.full((len(layout.sample_T), sum(MOE_LAYERS), SHAPE.topk), -1)
    # The first stage has the first of three mixtures, the second one the others.
    first = parallel_state.get_pipeline_model_parallel_rank()
    used_TLK[:, first : first + len(seen)] = used_experts(seen)
    dist.all_reduce(used_TLK, dist.ReduceOp.MAX, group=parallel_state.get_pipeline_model_parallel_group())
    used = [torch.full((length, sum(MOE_LAYERS), SHAPE.topk), -1) for length in lengths]
    for row_LK, sample, position in zip(used_TLK, layout.sample_T, layout.position_T, strict=True):
        if sample >= 0:
            used[sample][position] = row_LK
    return {"mine": list(mine), "used": used, "log_probs": log_probs, "response_indices": inputs.response_indices}


def work(rank: int, folder: str) -> None:
    """Replay under every topology, in every layout."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    whole = torch.load(f"{folder}/whole.pt")["weights"]
    for topology, sizes in TOPOLOGIES.items():
        store = dist.FileStore(f"{folder}/store of {topology}", WORLD_SIZE)
        with megatron_processes(store=store, rank=rank, world_size=WORLD_SIZE, **sizes):
            model = build(**sizes)
            model.load_state_dict(part_of(whole, model), strict=False)
            dp_rank, dp_size = (
                parallel_state.get_data_parallel_rank(),
                parallel_state.get_data_parallel_world_size(),
            )
            mine = range(dp_rank, len(LENGTHS), dp_size)
            for layout, padded_length in PADDED_LENGTHS.items():
                torch.save(replay(model, padded_length, mine), f"{folder}/{topology}, {layout}, {rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("routing")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with single_process():
        model = build()
        everything = range(len(LENGTHS))
        whole = {"weights": model.state_dict(), **replay(model, None, everything)}
        inputs = build_inputs(
            samples(), [n - 1 for n in LENGTHS], max_seq_lens=None, cp_rank=0, cp_size=1, device=torch.device("cpu")
        )
        with torch.no_grad():
            whole[NO_REPLAY] = score(model, inputs)
    torch.set_num_threads(threads)
    torch.save(whole, folder / "whole.pt")
    run_processes(work, str(folder), world_size=WORLD_SIZE)
    return folder


def outcomes(folder: Path, topology: str, layout: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{topology}, {layout}, {rank}.pt") for rank in range(WORLD_SIZE)]


@pytest.mark.whole_run
@pytest.mark.parametrize("layout", PADDED_LENGTHS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_token_goes_to_its_experts_on_whichever_rank_it_is(folder, topology, layout) -> None:
    used = [torch.full_like(sample.experts_TLK, -1, dtype=torch.long) for sample in given_experts()]
    for outcome in outcomes(folder, topology, layout):
        for sample, experts_TLK in zip(outcome["mine"], outcome["used"], strict=True):
            used[sample] = torch.maximum(used[sample], experts_TLK)
    for got, expected in zip(used, given_experts(), strict=True):
        assert torch.equal(got[:-1], expected.experts_TLK[:-1].sort(-1).values)


@pytest.mark.parametrize("layout", PADDED_LENGTHS)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_ranks_score_what_one_process_scores(folder, topology, layout) -> None:
    whole = torch.load(folder / "whole.pt")
    expected = whole["log_probs"].split([length - 1 for length in LENGTHS])
    assert (whole["log_probs"] - whole[NO_REPLAY]).abs().mean() > 1e-2
    is_scored = [torch.zeros(length - 1, dtype=torch.bool) for length in LENGTHS]
    for outcome in outcomes(folder, topology, layout):
        if outcome["log_probs"] is None:
            continue
        parts = outcome["log_probs"].split([len(part) for part in outcome["response_indices"]])
        for sample, part, got in zip(outcome["mine"], outcome["response_indices"], parts, strict=True):
            torch.testing.assert_close(got, expected[sample][part], rtol=0, atol=1e-5)
            is_scored[sample][part] = True
    assert all(scored.all() for scored in is_scored)
