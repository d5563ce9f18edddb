# SPDX-License-Identifier: Apache-2.0
"""Routing replay in Megatron-Core: whose experts are used and who weights them, what is refused, what is restored."""

import copy
import warnings
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from replayed_model import (
    CHECKPOINTS,
    SHAPE,
    Wrapper,
    backward_reversed,
    checkpoint_layers,
    chosen,
    gradients,
    padded_routing,
    pipeline_stage,
    random_routing,
    recompute,
    router_outputs,
    score_plainly,
    score_under,
    slots,
    tokens,
    train_on,
    train_under,
    used_experts,
    wrap_in_megatron,
)
from torch.overrides import TorchFunctionMode

with warnings.catch_warnings():
    # Megatron-Core reports at import that Transformer Engine and Apex are not installed.
    warnings.simplefilter("ignore")
    from grpo.layout import build_inputs
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.router_replay import RouterReplay
    from toy_moe import build_trainer, score, single_process

from mis_ext.onpolicy.routing.experts import RoutedExperts
from mis_ext.onpolicy.routing.replay import ForwardPasses, replay_routing
from mis_ext.onpolicy.routing.routing_layout import RoutingLayout

pytestmark = [
    # Of Megatron-Core itself, at every projection.
    pytest.mark.filterwarnings("ignore:Warning. tp_group is None:DeprecationWarning"),
    # Of a reentrant checkpoint in a pass without gradients.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

FIRST_ROUTER = r"decoder\.layers\.0\.mlp\.router"


@pytest.fixture(scope="module", autouse=True)
def process() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with single_process():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(process) -> torch.nn.Module:
    return build_trainer(SHAPE, seed=0)


@pytest.mark.parametrize("packed", [False, True])
def test_replaying_the_trainers_own_experts_changes_no_bit(model, packed) -> None:
    with router_outputs(model) as seen:
        recorded = score(model, tokens(), packed=packed)
    recorded.sum().backward()
    expected = gradients(model)
    make = RoutingLayout.packed if packed else lambda lengths: RoutingLayout.padded(lengths, padded_length=6)
    layout, used = make([6, 6]), used_experts(seen)
    samples = [
        RoutedExperts(experts_TLK=used[layout.sample_T == index][layout.position_T[:6].argsort()], num_experts=8)
        for index in range(2)
    ]
    with replay_routing(model, [layout.local(samples)]):
        replayed = score(model, tokens(), packed=packed)
        replayed.sum().backward()
    assert torch.equal(recorded, score(model, tokens(), packed=packed))
    assert torch.equal(recorded, replayed)
    assert all(torch.equal(x, y) for x, y in zip(expected, gradients(model), strict=True))


def test_tokens_that_were_not_recorded_keep_the_trainers_choice(model) -> None:
    whole = random_routing(6, seed=1)
    cached = RoutedExperts.from_rows(whole.experts_TLK[3:5], num_tokens=6, num_experts=8, start=3)
    local = RoutingLayout.padded([6], padded_length=6).local([cached], missing="own")
    with router_outputs(model) as own, torch.no_grad():
        score(model, tokens(1))
    with router_outputs(model) as seen, replay_routing(model, [local]), torch.no_grad():
        score(model, tokens(1))
    for column, name in enumerate(seen):
        # Causal: what precedes the first replayed token is not touched in any layer.
        assert chosen(seen[name][0][2])[:3] == chosen(own[name][0][2])[:3]
        assert chosen(seen[name][0][2])[3:5] == [set(row.tolist()) for row in whole.experts_TLK[3:5, column]]
    assert local.num_missing == 3


def test_replayed_experts_are_weighted_by_the_trainers_own_scores(model) -> None:
    local = padded_routing()
    with router_outputs(model) as seen, replay_routing(model, [local]), torch.no_grad():
        score(model, tokens())
    for column, (name, [(hidden, probs, _)]) in enumerate(seen.items()):
        experts = local.experts_TLK[:, column].long()
        is_replayed = experts[:, 0] >= 0
        logits = hidden[is_replayed] @ model.get_submodule(name).weight.T
        expected = logits.gather(1, experts[is_replayed]).softmax(-1)
        torch.testing.assert_close(probs[is_replayed].gather(1, experts[is_replayed]), expected)


def test_gradients_reach_the_routers_through_the_replayed_experts_only(model) -> None:
    everywhere = torch.tensor([2, 5]).expand(6, 2, 2)
    samples = [RoutedExperts(experts_TLK=everywhere, num_experts=8)] * 2
    with replay_routing(model, [RoutingLayout.padded([6, 6], padded_length=6).local(samples)]):
        score(model, tokens()).sum().backward()
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            assert parameter.grad[[2, 5]].abs().min() > 0
            assert (parameter.grad[[0, 1, 3, 4, 6, 7]] == 0).all()
    model.zero_grad(set_to_none=True)


def test_micro_batches_are_consumed_in_order(model) -> None:
    routings = [padded_routing(seed=10), padded_routing(seed=20)]
    alone = []
    for index, local in enumerate(routings):
        with replay_routing(model, [local]), torch.no_grad():
            alone.append(score(model, tokens(seed=index)))
    with replay_routing([model], routings), torch.no_grad():
        together = [score(model, tokens(seed=index)) for index in range(2)]
    assert all(torch.equal(x, y) for x, y in zip(alone, together, strict=True))


@pytest.fixture(autouse=True)
def no_cuda_generator(monkeypatch) -> None:
    """Megatron-Core's checkpoints keep the states of CUDA's generators, which nothing here draws from."""
    monkeypatch.setattr(random, "_get_all_rng_states", lambda: ())
    monkeypatch.setattr(random, "_set_all_rng_states", lambda: None)
    monkeypatch.setattr(random, "_fork_rng", nullcontext)


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize(
    ("part", "backward"),
    [
        ("layers", lambda losses: backward_reversed(losses[::-1])),
        ("layers", backward_reversed),
        ("layers", lambda losses: sum(losses).backward()),
        ("decoder", backward_reversed),
    ],
)
def test_layers_are_recomputed_with_their_micro_batch_in_any_order(model, kind, part, backward, monkeypatch) -> None:
    # The first and the last micro-batch are of the same tokens.
    batches = [(tokens(seed=seed % 2), padded_routing(seed=10 * seed)) for seed in range(3)]
    results = []
    for checkpointed in (False, True):
        if checkpointed and part == "layers":
            checkpoint_layers(model, monkeypatch, kind=kind)
        elif checkpointed:
            recompute(model.decoder, monkeypatch, kind=kind)
        with replay_routing(model, [routing for _, routing in batches]):
            backward([score(model, batch).pow(2 + index).sum() for index, (batch, _) in enumerate(batches)])
        results.append(gradients(model))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_layers_that_do_not_train_need_no_recomputation(model, kind, monkeypatch) -> None:
    checkpoint_layers(model, monkeypatch, kind=kind)
    for frozen in (model.embedding, model.decoder):
        frozen.requires_grad_(False)
    try:
        with replay_routing(model, [padded_routing()]):
            score(model, tokens()).sum().backward()
        assert len(gradients(model)) == 1
    finally:
        model.requires_grad_(True)


def test_a_pass_without_gradients_made_no_node_that_recomputes(model, monkeypatch) -> None:
    checkpoint_layers(model, monkeypatch, kind="reentrant")
    passes = ForwardPasses()
    with passes.watch([model]):
        score(model, tokens())
        trained = passes.current
        with torch.no_grad():
            score(model, tokens())
    assert len(trained.nodes) > 0
    assert len(passes.current.nodes) == 0


def test_a_recomputation_for_no_forward_pass_within_the_replay_is_an_error(model, monkeypatch) -> None:
    one_that_trains = torch.zeros(1, requires_grad=True)
    unknown = r"router is recomputed for a checkpoint that is not from a forward pass of the model in the block"
    for around in CHECKPOINTS.values():
        with pytest.raises(ValueError, match=unknown):
            train_on(model, scorer=lambda _, around=around: around(lambda x: x + score_plainly(model), one_that_trains))
    checkpoint_layers(model, monkeypatch, kind="reentrant")
    with pytest.raises(ValueError, match=unknown):
        train_on(model, before=score_plainly(model))
    recompute(model.decoder, monkeypatch, kind="reentrant")
    with pytest.raises(ValueError, match=unknown + ": .*, and do not nest checkpoints"):
        train_on(model)
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_second_recomputation_of_a_micro_batch_is_an_error(model, kind, monkeypatch) -> None:
    checkpoint_layers(model, monkeypatch, kind=kind)
    with pytest.raises(ValueError, match=r"layers\.2\.mlp\.router is recomputed twice for micro-batch 0"):
        train_on(model, passes=2)
    model.zero_grad(set_to_none=True)


def test_all_layers_share_one_copy_of_a_micro_batch(model) -> None:
    class Moves(TorchFunctionMode):
        moved = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.moved += func is torch.Tensor.to and args[0].dtype == torch.int32
            return func(*args, **(kwargs or {}))

    with Moves() as moves:
        score_under([padded_routing(), padded_routing()], model, passes=2)
    assert moves.moved == 2


def test_checkpointed_layers_must_be_recomputed_within_the_replay(model, monkeypatch) -> None:
    routing = padded_routing()
    # Without checkpoints the backward pass may follow the block.
    train_under([routing], model, backward_passes=0)
    with monkeypatch.context() as patched:
        checkpoint_layers(model, patched, kind="reentrant")
        with pytest.raises(
            ValueError, match=FIRST_ROUTER + " is recomputed in the backward pass, but only 0 of 1 backward"
        ):
            train_under([routing], model, backward_passes=0)
        score_under([routing], model, passes=1)
    checkpoint_layers(model, monkeypatch, kind="not reentrant")
    with pytest.raises(
        ValueError, match=FIRST_ROUTER + " is recomputed in the backward pass, but only 1 of 2 backward"
    ):
        train_under([routing, routing], model, backward_passes=1)
    model.zero_grad(set_to_none=True)


def test_a_layer_must_consume_exactly_its_rows(model) -> None:
    local = padded_routing()
    with pytest.raises(ValueError, match=FIRST_ROUTER + " ran for 1 of 2 micro-batches"):
        score_under([local, local], model, passes=1)
    with pytest.raises(ValueError, match=FIRST_ROUTER + r" runs more often than there are micro-batches \(1\)"):
        score_under([local], model, passes=2)
    wrong = RoutingLayout.packed([6, 6], num_local_tokens=13).local([random_routing(6, seed=1)] * 2)
    with pytest.raises(ValueError, match=FIRST_ROUTER + r" routes 12 tokens to 2 .* micro-batch 0 is \[13, 2\]"):
        score_under([wrong], model, passes=1)


@pytest.mark.parametrize("change", [{"layers": 3}, {"topk": 3}, {"num_experts": 9}])
def test_a_routing_of_another_model_is_refused(model, change) -> None:
    local = RoutingLayout.padded([6], padded_length=6).local([random_routing(6, seed=0, **change)])
    got = ", ".join(map(str, {"layers": 2, "topk": 2, "num_experts": 8, **change}.values()))
    with pytest.raises(ValueError, match=rf"num_experts\) = \({got}\), but the model has \(2, 2, 8\)"):
        score_under([local], model, passes=0)


def test_routers_are_restored_also_after_an_exception(model) -> None:
    theirs = RouterReplay()
    first = next(module for module in model.modules() if hasattr(module, "router_replay"))
    first.router_replay = theirs
    before, hooks = slots(model), len(model._forward_pre_hooks)
    listed = list(RouterReplay.global_router_replay_instances)
    try:
        with replay_routing(model, [padded_routing()]), torch.no_grad():
            score(model, tokens())
            assert all(x is not y for x, y in zip(before, slots(model), strict=True))
        assert all(x is y for x, y in zip(before, slots(model), strict=True))
        wrong = padded_routing((5, 5), length=5)
        with pytest.raises(ValueError, match="routes 12 tokens"):
            score_under([wrong], model, passes=1)
        assert all(x is y for x, y in zip(before, slots(model), strict=True))
        assert len(model._forward_pre_hooks) == hooks
        assert RouterReplay.global_router_replay_instances == listed
        assert theirs.target_topk_idx is theirs.recorded_topk_idx is theirs.router_replay_action is None
    finally:
        first.router_replay = None
        RouterReplay.global_router_replay_instances.remove(theirs)


def test_a_pipeline_stage_takes_the_columns_of_its_own_layers(model) -> None:
    stage = pipeline_stage(model)
    stage.last = model.decoder.layers[2]
    local = padded_routing()
    with router_outputs(stage) as seen, replay_routing(stage, [local]), torch.no_grad():
        score(model, tokens())
    expected = local.experts_TLK[:, 1:].sort(-1).values
    was_replayed = expected[:, 0, 0] >= 0
    assert torch.equal(used_experts(seen)[was_replayed].int(), expected[was_replayed])


def test_layers_of_multi_token_prediction_keep_their_own_routing(model) -> None:
    stage = pipeline_stage(model)
    stage.decoder = model.decoder.layers[2]
    stage.mtp = torch.nn.Module()
    stage.mtp.layer = model.decoder.layers[0]
    with replay_routing(stage, [padded_routing()]), torch.no_grad():
        assert [slot is None for slot in slots(model)] == [True, False]
        score(model, tokens())


@pytest.mark.parametrize(("frequency", "moe_layers"), [([0, 1, 1], [1, 2]), (3, [0])])
def test_the_configuration_says_which_layers_are_mixtures_of_experts(frequency, moe_layers) -> None:
    model = build_trainer(SHAPE, seed=0, moe_layer_freq=frequency)
    sample = random_routing(6, seed=0, layers=len(moe_layers))
    local = RoutingLayout.padded([6], padded_length=6).local([sample])
    with router_outputs(model) as seen, replay_routing(model, [local]), torch.no_grad():
        score(model, tokens(1))
    assert list(seen) == [f"decoder.layers.{index}.mlp.router" for index in moe_layers]
    for column, [(_, _, routing_map)] in enumerate(seen.values()):
        assert chosen(routing_map)[:5] == [set(row.tolist()) for row in sample.experts_TLK[:5, column]]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("moe_router_fusion", True, "moe_router_fusion = True .* set it to False"),
        ("moe_expert_capacity_factor", 1.0, r"moe_expert_capacity_factor = 1\.0 .* set it to None"),
        ("cuda_graph_impl", "local", "cuda_graph_impl = 'local' .* set it to 'none'"),
        ("moe_router_load_balancing_type", "sinkhorn", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"], "sinkhorn"),
        ("num_moe_experts", None, "no mixture-of-experts layers"),
    ],
)
def test_models_that_would_not_keep_to_the_routing_are_refused(model, key, value, message) -> None:
    changed = torch.nn.Module()
    changed.config, changed.inner = copy.copy(model.config), model
    setattr(changed.config, key, value)
    with pytest.raises(ValueError, match=message), replay_routing(changed, []):
        pass


@pytest.mark.parametrize("wrap", [Wrapper, wrap_in_megatron])
def test_a_wrapped_model_is_replayed_like_the_model_inside(wrap, monkeypatch) -> None:
    wrapped = wrap(build_trainer(SHAPE, seed=0))
    inner = next(module for module in wrapped.modules() if hasattr(module, "decoder"))
    checkpoint_layers(inner, monkeypatch, kind="reentrant")
    routings = [padded_routing(seed=10), padded_routing(seed=20)]
    with router_outputs(wrapped) as seen, replay_routing(wrapped, routings):
        (score(wrapped, tokens()) + score(wrapped, tokens())).sum().backward()
    for call, local in enumerate(routings):
        expected = local.experts_TLK.sort(-1).values
        was_replayed = expected[:, 0, 0] >= 0
        assert torch.equal(used_experts(seen, call)[was_replayed].int(), expected[was_replayed])


def test_what_is_no_model_of_megatron_core_is_refused() -> None:
    with pytest.raises(TypeError, match="Linear is not a Megatron-Core model: it has no config"):
        replay_routing(Wrapper(torch.nn.Linear(2, 2)), []).__enter__()


def test_without_pipeline_stages_a_missing_router_is_an_error(model) -> None:
    part = torch.nn.Module()
    part.config, part.layer = model.config, model.decoder.layers[2]
    with pytest.raises(ValueError, match="routers of 1 of 2 mixture-of-experts layers"), replay_routing(part, []):
        pass


@pytest.mark.parametrize("max_seq_lens", [None, [18, 18, 18]])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_rows_are_in_the_order_in_which_the_example_feeds_its_tokens(cp_size, max_seq_lens) -> None:
    lengths = [7, 16, 3]
    samples = [torch.arange(1, n + 1) + 100 * index for index, n in enumerate(lengths)]
    experts = [RoutedExperts(experts_TLK=sample.view(-1, 1, 1), num_experts=1000) for sample in samples]
    for cp_rank in range(cp_size):
        ranks = {"cp_rank": cp_rank, "cp_size": cp_size}
        inputs = build_inputs(samples, [2, 2, 2], max_seq_lens=max_seq_lens, device=torch.device("cpu"), **ranks)
        if max_seq_lens is None:
            layout = RoutingLayout.packed(lengths, **ranks)
        else:
            layout = RoutingLayout.padded(lengths, padded_length=18, **ranks)
        rows = layout.local(experts).experts_TLK.flatten()
        # The embedding turns [batch, sequence] into [sequence, batch]; token 0 is padding.
        fed = inputs.tokens.T.flatten()
        assert torch.equal(rows, torch.where(fed == 0, -1, fed).int())
