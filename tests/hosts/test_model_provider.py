# SPDX-License-Identifier: Apache-2.0
"""Frameworks with a model that passes hidden states: their scoring passes, their loss, and what is refused."""

import sys
from types import ModuleType, SimpleNamespace

import host_stand_ins
import loss_cases
import pytest
import torch
from host_stand_ins import HOSTS, running
from torch.utils.checkpoint import checkpoint

import mis_ext
from mis_ext.frameworks import MILES, SLIME, find_framework
from mis_ext.hosts.megatron import Head, NoLogits
from mis_ext.hosts.session import current_run
from mis_ext.hosts.slime_miles import policy_loss as hosts
from mis_ext.hosts.slime_miles import policy_loss as provider

WIDTH = 5
NAMES = ("unconcat_tokens", "total_lengths", "response_lengths")
LOSS = {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss"}


def handed_over(logits: torch.Tensor) -> tuple[NoLogits, Head]:
    """As the layer does it, from hidden states and a weight of which these logits are the product."""
    left, values, right = torch.linalg.svd(logits[0].double(), full_matrices=False)
    states = (left * values).float().unsqueeze(1).requires_grad_()
    head = Head(states, right.T.float().contiguous().requires_grad_(), None, False, False)
    return NoLogits.with_head(states[..., :0].repeat(1, 1, 1), head).transpose(0, 1).contiguous().float(), head


def batch_of(options: dict) -> tuple:
    args = loss_cases.host_args(**options)
    batch = loss_cases.with_options(loss_cases.local_batch(loss_cases.whole_batch()), args)
    return args, batch, batch.pop("logits")


@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("host", HOSTS)
def test_a_scoring_pass_gives_what_the_hosts_function_gives_from_logits(host, with_entropy) -> None:
    args, batch, logits = batch_of({"rollout_temperature": 0.7})
    given = {"args": args, "with_entropy": with_entropy} | {name: batch[name] for name in NAMES}
    # Miles' own has a default for it, the stand-in has not; its pass gives the lengths of padded rows.
    given |= {"entropy_requires_grad": True, "max_seq_lens": None} if host == "miles" else {}
    with running(host), torch.no_grad():
        of_host = sys.modules[find_framework().loss].get_log_probs_and_entropy
        score = provider._scoring(of_host)
        wanted = score(logits, **given)
        found = score(handed_over(logits)[0], **given)
    if host != "miles":
        assert found[0].shape == (0,)
        wanted, found = wanted[1], found[1]
    assert found.keys() == {"log_probs", "entropy"} if with_entropy else {"log_probs"}
    for name, samples in found.items():
        assert [len(sample) for sample in samples] == batch["response_lengths"]
        for own, other in zip(samples, wanted[name], strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_miles_greedy_sampling_divides_by_nothing() -> None:
    found = []
    for temperature in (0.0, 1.0):
        args, batch, logits = batch_of({"rollout_temperature": temperature})
        with running("miles"), torch.no_grad():
            given = {"args": args} | {name: batch[name] for name in NAMES}
            found.append(torch.cat(hosts.scores_without_logits(handed_over(logits)[0], **given)["log_probs"]))
    assert torch.equal(*found)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("observes", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_scoring_pass_computes_the_entropy_that_it_is_asked_for(host, observes, with_entropy, monkeypatch) -> None:
    args, batch, logits = batch_of({"observe_training_entropy": observes})
    score, scored = hosts.fused_scores, []
    monkeypatch.setattr(hosts, "fused_scores", lambda *a, **keys: scored.append(score(*a, **keys)) or scored[-1])
    with running(host), torch.no_grad():
        given = {"args": args, "with_entropy": with_entropy} | {name: batch[name] for name in NAMES}
        hosts.scores_without_logits(handed_over(logits)[0], **given)
    assert [each.entropy_T is not None for each in scored] == [with_entropy]


def test_slimes_pass_replays_what_top_p_kept_where_it_is_told_to() -> None:
    args, batch, logits = batch_of(loss_cases.TOP_P)
    batch |= loss_cases.with_top_p(loss_cases.whole_batch())
    kept = {"top_p_token_ids": batch[hosts.IDS], "top_p_token_offsets": batch[hosts.OFFSETS]}
    given = {"args": args} | {name: batch[name] for name in NAMES}
    with running("slime"), torch.no_grad():
        score = provider._scoring(sys.modules[SLIME.loss].get_log_probs_and_entropy)
        pairs = [(score(handed_over(logits)[0], **given, **more), more) for more in ({}, kept)]
        plain = score(logits, **given, with_entropy=False)[1]["log_probs"]
        replayed = score(logits, **given, with_entropy=False, **kept)[1]["log_probs"]
    for (found, _), wanted in zip(pairs, (plain, replayed), strict=True):
        torch.testing.assert_close(torch.cat(found[1]["log_probs"]), torch.cat(wanted), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(torch.cat(plain), torch.cat(replayed))


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"kept_token_ids": []}, TypeError, "unexpected keyword argument 'kept_token_ids'"),
        ({"non_loss_data": False}, ValueError, "non_loss_data must be True"),
    ],
)
def test_what_a_host_says_under_another_name_is_not_passed_over(more, error, message) -> None:
    args, batch, logits = batch_of({})
    given = {"args": args, "non_loss_data": True} | {name: batch[name] for name in NAMES}
    with running("slime"), torch.no_grad():
        hosts.scores_without_logits(handed_over(logits)[0], **given)
        with pytest.raises(error, match=message):
            hosts.scores_without_logits(handed_over(logits)[0], **given | more)


@pytest.mark.parametrize("host", HOSTS)
def test_the_loss_and_its_gradient_are_those_over_logits(host) -> None:
    options = loss_cases.GATES | loss_cases.KL | {"entropy_coef": 0.1, "rollout_temperature": 0.7}
    args, batch, logits = batch_of(options)
    with running(host):
        logits = logits.clone().requires_grad_()
        wanted, metrics = mis_ext.policy_loss(args, batch, logits)
        wanted.backward()
        empty, head = handed_over(logits.detach())
        found, others = mis_ext.policy_loss(args, batch, empty)
        found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert [*others] == [*metrics]
    for name, value in others.items():
        torch.testing.assert_close(value, metrics[name], rtol=1e-4, atol=1e-5, msg=name)
    gradient = logits.grad[0] @ head.weight.detach()
    torch.testing.assert_close(head.hidden_SBH.grad[:, 0], gradient, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        head.weight.grad, logits.grad[0].T @ head.hidden_SBH.detach()[:, 0], rtol=1e-4, atol=1e-6
    )


def test_a_bias_is_added_and_main_grad_takes_the_gradient_of_the_weight() -> None:
    args, batch, logits = batch_of({})
    bias = torch.linspace(-1.0, 1.0, logits.shape[-1]).requires_grad_()
    leaf = logits.clone().requires_grad_()
    empty, head = handed_over(logits)
    head.weight.main_grad = torch.zeros_like(head.weight)
    head = head._replace(bias=bias, gradient_accumulation_fusion=True)
    with running("slime"):
        wanted, _ = mis_ext.policy_loss(args, batch, leaf + bias.detach())
        wanted.backward()
        found, _ = mis_ext.policy_loss(args, batch, NoLogits.with_head(torch.zeros(empty.shape), head))
        found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(bias.grad, leaf.grad[0].sum(0), rtol=1e-4, atol=1e-6)
    gradient = leaf.grad[0].T @ head.hidden_SBH.detach()[:, 0]
    torch.testing.assert_close(head.weight.main_grad, gradient, rtol=1e-4, atol=1e-6)
    assert head.weight.grad is None


def test_the_hosts_function_is_called_where_there_are_logits() -> None:
    with running("miles") as asked:
        args, batch, logits = batch_of({})
        score = provider._scoring(sys.modules[MILES.loss].get_log_probs_and_entropy)
        given = {name: batch[name] for name in NAMES}
        score(logits, args=args, with_entropy=False, entropy_requires_grad=False, max_seq_lens=None, **given)
        assert len(asked.scored) == 1


def test_an_actor_calls_ours_once_replaced_and_one_without_the_name_is_refused() -> None:
    actor = ModuleType("slime.backends.megatron_utils.actor")
    with pytest.raises(ValueError, match="no longer has get_log_probs_and_entropy"):
        provider._replace_scoring(actor)
    actor.get_log_probs_and_entropy = host_stand_ins.called
    provider._replace_scoring(actor)
    ours = actor.get_log_probs_and_entropy
    assert ours is not host_stand_ins.called
    # A second stage of the model replaces nothing again.
    provider._replace_scoring(actor)
    assert actor.get_log_probs_and_entropy is ours
    assert ours.__wrapped__ is host_stand_ins.called


class Layer(torch.nn.Linear):
    """The output layer of a stand-in for Megatron-Core: its logits, and no bias beside them."""

    gather_output = sequence_parallel = skip_bias_add = gradient_accumulation_fusion = False

    def forward(self, states, weight=None, runtime_gather_output=None):
        return torch.nn.functional.linear(states, self.weight if weight is None else weight), None


@pytest.fixture(params=HOSTS)
def host_modules(request, monkeypatch) -> SimpleNamespace:
    """What the provider imports of a host and of Megatron, and what the host's own provider was asked."""
    host, asked = request.param, SimpleNamespace(host=request.param, given=[], args=loss_cases.host_args(**LOSS))
    asked.args.custom_model_provider_path = "mis_ext.model_provider"
    backend = f"{host}.backends.megatron_utils"
    names = ("megatron.training.global_vars", "megatron.core.tensor_parallel", f"{backend}.model_provider")
    variables, parallel, of_host = modules = [ModuleType(name) for name in names]
    asked.actor = ModuleType(f"{backend}.actor")
    for module in (*modules, asked.actor):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    asked.actor.get_log_probs_and_entropy = host_stand_ins.called
    variables.get_args = lambda: asked.args
    parallel.ColumnParallelLinear = Layer

    def get_model_provider_func(args):
        # As the hosts do it: the given path comes before their own model, and would be ours again.
        assert args.custom_model_provider_path is None

        def make(pre_process, post_process, vp_stage):
            asked.given.append((pre_process, post_process, vp_stage))
            model = SimpleNamespace(config=SimpleNamespace(defer_embedding_wgrad_compute=False))
            if post_process:
                model.output_layer, model.compute_language_model_loss = Layer(WIDTH, 7, bias=False), None
            return model

        return make

    of_host.get_model_provider_func = get_model_provider_func
    with running(host):
        yield asked


def test_the_hosts_own_model_hands_over_hidden_states_and_its_actor_scores_them(host_modules) -> None:
    of_host = host_modules.actor.get_log_probs_and_entropy
    model = provider.model_provider(True, post_process=True, vp_stage=3)
    assert host_modules.given == [(True, True, 3)]
    states = torch.randn(4, 1, WIDTH)
    logits, _ = model.output_layer(states)
    assert isinstance(logits, NoLogits)
    assert logits.head.hidden_SBH is states
    assert host_modules.actor.get_log_probs_and_entropy.__wrapped__ is of_host
    # The arguments of the run are the host's own.
    assert host_modules.args.custom_model_provider_path == "mis_ext.model_provider"
    # A critic's layer is put in its place afterwards.
    model.output_layer = torch.nn.Linear(WIDTH, 1)
    assert model.output_layer(states).shape == (4, 1, 1)


def test_the_head_is_what_the_layer_multiplies_by(host_modules) -> None:
    layer = provider.model_provider().output_layer
    layer.bias = torch.nn.Parameter(torch.zeros(7))
    layer.tp_group = SimpleNamespace(size=lambda: 2)
    states, tied = torch.randn(4, 1, WIDTH), torch.randn(7, WIDTH)
    for split, fused in ((False, True), (True, False)):
        layer.sequence_parallel, layer.gradient_accumulation_fusion = split, fused
        for given in (None, tied):
            logits, bias = layer(states, given)
            assert logits.shape == (8 if split else 4, 1, 0)
            assert bias is None
            weight = layer.weight if given is None else tied
            assert all(
                own is other for own, other in zip(logits.head, (states, weight, layer.bias, split, fused), strict=True)
            )


def test_a_stage_without_an_output_layer_is_the_hosts_own(host_modules) -> None:
    of_host = host_modules.actor.get_log_probs_and_entropy
    model = provider.model_provider(post_process=False)
    assert host_modules.given == [(True, False, None)]
    assert not hasattr(model, "output_layer")
    assert host_modules.actor.get_log_probs_and_entropy is of_host


def test_no_model_is_made_where_the_run_needs_logits(host_modules) -> None:
    host_modules.args.mis_loss_inplace = True
    with pytest.raises(ValueError, match="mis_loss_inplace: no effect without logits"):
        provider.model_provider()
    assert host_modules.given == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "policy_loss"}, "only mis_ext.policy_loss takes hidden states"),
        ({"mis_loss_scoring": "host"}, "the framework's own function scores here"),
        ({"true_on_policy_mode": True}, "the framework's own function scores here"),
        ({"allgather_cp": True, "context_parallel_size": 2}, "the framework's own function scores here"),
        ({"mis_loss_inplace": True}, "mis_loss_inplace: no effect without logits"),
    ],
)
def test_what_needs_logits_is_refused(options, message) -> None:
    args = loss_cases.host_args(**LOSS | options)
    with pytest.raises(ValueError, match=message):
        provider.refuse_missing_logits(args, current_run(args, whole_loss=True).config)


def test_miles_checkpoint_of_a_loss_is_refused_and_slimes_is_not() -> None:
    args = loss_cases.host_args(**LOSS, recompute_loss_function=True)
    config = current_run(args, whole_loss=True).config
    with running("slime"):
        provider.refuse_missing_logits(args, config)
    with running("miles"), pytest.raises(ValueError, match="--recompute-loss-function of Miles detaches the logits"):
        provider.refuse_missing_logits(args, config)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_loss_that_is_computed_again_trains_the_model_or_is_refused(use_reentrant) -> None:
    args, batch, logits = batch_of({})
    with running("slime"):
        (wanted, _), head = loss_of(args, batch, handed_over(logits))
        wanted.backward()
        empty, other = handed_over(logits)
        found, _ = checkpoint(mis_ext.policy_loss, args, batch, empty, use_reentrant=use_reentrant)
        if use_reentrant:
            with pytest.raises(ValueError, match="between it and the loss has dropped them"):
                found.backward()
        else:
            found.backward()
            assert torch.equal(other.hidden_SBH.grad, head.hidden_SBH.grad)


def loss_of(args, batch, given: tuple) -> tuple:
    return mis_ext.policy_loss(args, batch, given[0]), given[1]


def test_the_hosts_own_function_is_not_called_in_a_loss_without_logits() -> None:
    args, batch, logits = batch_of({"mis_loss_scoring": "host"})
    with running("slime"), pytest.raises(ValueError, match="has no logits for the framework's own"):
        mis_ext.policy_loss(args, batch, handed_over(logits)[0])


def test_a_rank_without_tokens_still_reaches_its_hidden_states() -> None:
    # The backward pass of context parallelism has collectives, in which such a rank must take part.
    args, batch, logits = batch_of({})
    none = {key: [] for key in batch if isinstance(batch[key], list)}
    empty, head = handed_over(logits)
    with running("slime"):
        loss, _ = mis_ext.policy_loss(args, batch | none | {"rollout_mask_sums": torch.zeros(0)}, empty)
    loss.backward()
    assert torch.equal(head.hidden_SBH.grad, torch.zeros_like(head.hidden_SBH))
