# SPDX-License-Identifier: Apache-2.0
"""A model of Megatron-Core that hands over hidden states has the loss, metrics and gradients of one with logits.

Real models through Megatron-Core's own schedules, in a process for each rank.
"""

import functools
import importlib.util
import operator
import sys
import warnings
from pathlib import Path
from unittest.mock import patch

import loss_cases
import pytest
import torch
from process_ranks import joined, run_processes

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron not installed (requirements/example.txt)", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

with warnings.catch_warnings():
    # Megatron-Core reports at import that Transformer Engine and Apex are not installed.
    warnings.simplefilter("ignore")
    from grpo.cpu import megatron_device
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

import mis_ext
from mis_ext.hosts.megatron import Head, NoLogits

WIDTH, LENGTH = 16, 16
KEYS = loss_cases.GATES | loss_cases.KL | {"kl_loss_type": "k3", "entropy_coef": 0.1, "rollout_temperature": 0.7}
LAYOUTS = {
    "one rank": {},
    "TP 2": {"tensor_model_parallel_size": 2},
    "TP 2, sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP 2": {"pipeline_model_parallel_size": 2},
}


def test_what_passes_logits_on_keeps_their_head_and_nothing_else_does() -> None:
    states = torch.zeros(3, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    head = Head(states, torch.zeros(5, 4), None, False, False)
    logits = NoLogits.with_head(states[..., :0].repeat(2, 1, 1), head)
    passed = logits.transpose(0, 1).contiguous().float()
    assert isinstance(passed, NoLogits)
    assert passed.head is head
    assert passed.shape == (2, 6, 0)
    # The graph leads to the hidden states.
    assert torch.autograd.grad(passed.sum(), states)[0].shape == states.shape
    assert passed.float() is passed
    named = torch.transpose(input=logits, dim0=0, dim1=1)
    assert isinstance(named, NoLogits)
    assert named.head is head
    # A detached tensor whose head is not detached would train.
    for changed in (logits / 2.0, logits + 1.0, torch.tanh(logits), logits.detach(), logits.data):
        assert not isinstance(changed, NoLogits)


@pytest.mark.parametrize(
    "change",
    [
        lambda logits: logits.div_(7.0),
        lambda logits: operator.itruediv(logits, 7.0),
        lambda logits: torch.div(logits, 7.0, out=logits),
        lambda logits: torch.nn.functional.relu(logits, inplace=True),
        lambda logits: operator.setitem(logits, 0, 1.0),
    ],
    ids=["div_", "/=", "out", "inplace", "[0] ="],
)
def test_an_operation_in_place_is_not_lost(change) -> None:
    logits = NoLogits.with_head(torch.zeros(3, 2, 0), Head(torch.zeros(3, 2, 4), torch.zeros(5, 4), None, False, False))
    # As autograd lets it be changed.
    assert logits.requires_grad_() is logits
    assert logits.requires_grad_(False) is logits
    with pytest.raises(RuntimeError, match="in place has no effect on a loss without logits"):
        change(logits)


def test_logits_that_have_lost_their_head_are_refused() -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    logits = batch.pop("logits")[..., :0].requires_grad_()
    with pytest.raises(ValueError, match="between it and the loss has dropped them"):
        mis_ext.make_loss_func(loss_cases.host_args(), batch)(logits)


def built(config: TransformerConfig, *, is_tied: bool) -> GPTModel:
    def torch_norm(_: type, *, config: TransformerConfig, hidden_size: int, eps: float) -> torch.nn.LayerNorm:
        return torch.nn.LayerNorm(hidden_size, eps)

    torch.manual_seed(5)
    # Megatron-Core's own refuses sequence parallelism, for sums over ranks that are not looked at here.
    with patch.object(WrappedTorchNorm, "__new__", torch_norm):
        model = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=loss_cases.VOCABULARY,
            max_sequence_length=128,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=is_tied,
        )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0 if parameter.ndim == 2 and parameter.shape[-1] == WIDTH else 1.0)
    return model


def trained(layout: dict, *, is_tied: bool, is_padded: bool, is_bfloat16: bool, hands_over: bool):
    """Losses and metrics of two micro-batches, the gradient of every parameter, and widths of logits."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=is_bfloat16,
        params_dtype=torch.bfloat16 if is_bfloat16 else torch.float32,
        pipeline_dtype=torch.bfloat16 if is_bfloat16 else torch.float32,
        **layout,
    )
    model = built(config, is_tied=is_tied)
    if hands_over and model.post_process:
        mis_ext.hand_over_hidden_states(model)
    whole = Float16Module(config, model) if is_bfloat16 else model
    batch = loss_cases.local_batch(loss_cases.whole_batch())
    del batch["logits"]
    args = loss_cases.host_args(**KEYS, qkv_format="bshd" if is_padded else "thd")
    rows = batch["unconcat_tokens"]
    if is_padded:
        batch["max_seq_lens"] = [LENGTH] * len(rows)
        tokens = torch.stack([torch.nn.functional.pad(row, (0, LENGTH - len(row))) for row in rows])
    else:
        tokens = torch.cat([*rows, torch.zeros(sum(map(len, rows)) % 2, dtype=torch.int64)])[None]
    widths = []

    def forward_step(_iterator, chunk):
        logits = chunk(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)
        widths.append(logits.shape[-1])
        return logits, mis_ext.make_loss_func(args, batch)

    found = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=whole,
        num_microbatches=2,
        seq_length=tokens.shape[1],
        micro_batch_size=len(tokens),
        forward_only=False,
    )
    return found, {name: parameter.grad for name, parameter in model.named_parameters()}, widths


def compare(rank: int, folder: str, name: str, world_size: int, is_bfloat16: bool) -> None:
    layout = LAYOUTS[name]
    with (
        joined(rank, world_size, folder, seconds=60),
        megatron_device(torch.device("cpu")),
        patch("torch.cuda.synchronize"),
    ):
        warnings.simplefilter("ignore")
        sizes = {key: size for key, size in layout.items() if key.endswith("_size")}
        parallel_state.initialize_model_parallel(**sizes)
        for is_tied, is_padded in ((False, False), (True, True)):
            case = {"is_tied": is_tied, "is_padded": is_padded, "is_bfloat16": is_bfloat16}
            wanted, gradients, of_logits = trained(layout, hands_over=False, **case)
            found, others, widths = trained(layout, hands_over=True, **case)
            if parallel_state.is_pipeline_last_stage():
                assert {*widths} == {0}
                assert {*of_logits} == {loss_cases.VOCABULARY // layout.get("tensor_model_parallel_size", 1)}
            close = {"rtol": 0.1, "atol": 5e-2} if is_bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
            for ours, theirs in zip(found, wanted, strict=True):
                assert [*ours] == [*theirs]
                for key in ours:
                    torch.testing.assert_close(
                        ours[key], theirs[key], equal_nan=True, msg=lambda m, k=key: k + m, **close
                    )
            assert any(grad is not None for grad in gradients.values())
            norm = sum(grad.float().square().sum() for grad in gradients.values() if grad is not None).sqrt()
            for key, grad in gradients.items():
                apart = (grad.float() - others[key].float()).norm() / norm
                assert apart < (3e-2 if is_bfloat16 else 1e-6), (case, key, float(apart))
            assert norm > 1e-2
        if name == "one rank" and not is_bfloat16:
            others_get_logits()
        parallel_state.destroy_model_parallel()


def others_get_logits() -> None:
    """Of one rank: inference, the model's own loss, and a layer in the place of the changed one."""
    config = {"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 2, "use_cpu_initialization": True}
    config |= {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    plain, ours = (built(TransformerConfig(**config), is_tied=True) for _ in range(2))
    names = [*ours.state_dict()]
    mis_ext.hand_over_hidden_states(ours)
    assert [*ours.state_dict()] == names
    tokens = torch.arange(6)[None] % loss_cases.VOCABULARY
    given = (tokens, torch.arange(6)[None], None)
    assert ours(*given).shape == (1, 6, 0)
    assert torch.equal(ours(*given, runtime_gather_output=True), plain(*given, runtime_gather_output=True))
    # Multi-token prediction calls the same function.
    assert torch.equal(ours(*given, labels=tokens), plain(*given, labels=tokens))
    ours.output_layer = plain.output_layer
    assert torch.equal(ours(*given), plain(*given))
    for of, name, message in (
        ("output_layer", "gather_output", "gathers the vocabulary"),
        ("config", "use_mup", "--use-mup scales the logits"),
        ("config", "defer_embedding_wgrad_compute", "keeps the input of the output layer"),
    ):
        model = built(TransformerConfig(**config), is_tied=True)
        setattr(getattr(model, of), name, True)
        with pytest.raises(ValueError, match=message):
            mis_ext.hand_over_hidden_states(model)
    for layer, message in (
        (torch.nn.Linear(WIDTH, 1), "the output layer is a Linear"),
        (Capped(WIDTH, 8, bias=False, **layer_keys()), "is a Capped with its own forward"),
        (Wrapped(WIDTH, 8, bias=False, **layer_keys()), "is a Wrapped with its own forward"),
        (ColumnParallelLinear(WIDTH, 8, skip_bias_add=True, **layer_keys()), "leaves its bias to its caller"),
    ):
        model.output_layer = layer
        with pytest.raises(ValueError, match=message):
            mis_ext.hand_over_hidden_states(model)
    # Layers of another name that make the same logits, and a flag without a bias to leave.
    model.config.defer_embedding_wgrad_compute = False
    for kind in (Renamed, LinearCrossEntropyModule):
        model.output_layer = kind(WIDTH, 8, bias=False, skip_bias_add=True, **layer_keys())
        mis_ext.hand_over_hidden_states(model)
        logits, _ = model.output_layer(torch.zeros(3, 2, WIDTH))
        assert isinstance(logits, NoLogits)


def layer_keys() -> dict:
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=2, use_cpu_initialization=True)
    return {"config": config, "init_method": torch.nn.init.ones_}


class Renamed(ColumnParallelLinear):
    pass


class Wrapped(ColumnParallelLinear):
    """A soft cap under the name of the plain layer's own function."""

    @functools.wraps(ColumnParallelLinear.forward)
    def forward(self, *given):
        return Capped.forward(self, *given)


class LinearCrossEntropyModule(ColumnParallelLinear):
    """As the output layer of the Megatron-Core that slime and Miles pin; the released 0.16.1 has none."""

    def forward(self, input_, weight=None, runtime_gather_output=None, output_cross_entropy_loss=False, labels=None):
        assert not output_cross_entropy_loss
        return super().forward(input_, weight, runtime_gather_output)

    forward.__module__ = "megatron.core.transformer.linear_cross_entropy"
    forward.__qualname__ = "LinearCrossEntropyModule.forward"


class Capped(ColumnParallelLinear):
    """As Gemma 2 needs it."""

    def forward(self, *given):
        logits, bias = super().forward(*given)
        return 30.0 * torch.tanh(logits / 30.0), bias


@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
def test_hidden_states_train_as_logits_do(name, tmp_path) -> None:
    world_size = 1 if name == "one rank" else 2
    run_processes(compare, str(tmp_path), name, world_size, False, world_size=world_size)


@pytest.mark.distributed
def test_a_model_in_bfloat16_hands_over_its_own_hidden_states(tmp_path) -> None:
    run_processes(compare, str(tmp_path), "one rank", 1, True, world_size=1)
