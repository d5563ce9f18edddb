# SPDX-License-Identifier: Apache-2.0
"""Any published method by one key: the whole loss is the method, with corrections, denominators and penalties."""

import dataclasses
import random
import re

import loss_cases
import method_losses
import pytest
import torch
from loss_cases import GATES, GATES_ALONE, HOOK
from method_cases import parameters
from test_policy_loss_modes import PLAIN, correction_of, log_probs_of
from thread_ranks import Rank, run_ranks

from mis_ext import PackedLayout
from mis_ext.hosts.megatron import Host, batch_loss, plain_scores
from mis_ext.hosts.session import current_run
from mis_ext.loss.settings import LossSettings
from mis_ext.methods import METHODS
from mis_ext.methods.catalogue import choose_method

UNSET = {"eps_clip": 0.2, "eps_clip_high": None}
"""The clip as the hosts have it where nobody sets it."""
KEPT = {"mis_loss_denominator": "kept"}
each_method = pytest.mark.parametrize("name", METHODS)


OWN = {"m2po": {"budget": 0.02}, "gmpo": {"low": 0.9, "high": 1.1}}
"""Where the parameters of other tests do nothing on the batch of this one."""


def key_of(name: str) -> dict:
    """The key, with parameters that fire on random data."""
    given = parameters(name) | OWN.get(name, {})
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()}
    # Where the trainer's own scoring is not looked at, the host may skip it.
    skips = "proximal" not in METHODS[name].method.policies
    return {"mis_loss_method": {"name": name} | given, "use_rollout_logprobs": skips} | UNSET


def batch_of(*, dtype=torch.float64) -> dict:
    batch = loss_cases.whole_batch(dtype=dtype)
    generator = torch.Generator().manual_seed(11)
    batch["state_values"] = [
        x + 0.3 * torch.randn(len(x), generator=generator, dtype=dtype) for x in batch["advantages"]
    ]
    return batch


def computed(keys: dict, batch: dict | None = None, *, host: Host = PLAIN):
    """Loss, metrics, and the gradient in the logits."""
    batch = loss_cases.local_batch(batch_of()) if batch is None else dict(batch)
    logits = batch.pop("logits").clone().requires_grad_()
    run = current_run(loss_cases.host_args(**keys), whole_loss=True)
    found = batch_loss(run, host, batch, logits)
    (gradient,) = torch.autograd.grad(found.loss, logits)
    return found.loss.detach(), found.metrics, gradient


def drawn_options(name: str) -> dict:
    """What goes with a method, drawn: a correction, a denominator, penalties, tokens as terms."""
    draw = random.Random(name)
    chosen = choose_method("mis_loss_method", key_of(name)["mis_loss_method"]).method
    keys = draw.choice([{}, GATES_ALONE] if chosen.weighs_behavior else [{}, GATES_ALONE, GATES])
    keys = keys if chosen.surrogate.spread == "token" else {}
    keys = keys | draw.choice([{}, {"entropy_coef": 0.1}])
    if "reference" not in chosen.policies:
        keys = keys | draw.choice([{}, {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"}])
    denominators = [{}, {"calculate_per_token_loss": True}]
    denominators += [
        {"mis_loss_denominator": "sequence"},
        {"mis_loss_denominator": "constant", "mis_loss_constant": 7.0},
    ]
    return keys | draw.choice(denominators)


def written_out(name: str, options: dict, batch: dict, logits: torch.Tensor) -> torch.Tensor:
    """The loss from the method itself, which other tests compare with its paper, and sums over samples."""
    args = loss_cases.host_args(**options)
    current, entropies = log_probs_of(logits, batch, 1.0)
    lengths = batch["response_lengths"]
    masks = torch.cat(batch["loss_masks"])
    method = METHODS[name](**parameters(name) | OWN.get(name, {}))
    x = torch.cat(current)
    given = {
        "current_logprobs_T": x,
        "behavior_logprobs_T": torch.cat(batch["rollout_log_probs"]),
        "proximal_logprobs_T": torch.cat(batch["log_probs"]),
        "reference_logprobs_T": torch.cat(batch["ref_log_probs"]),
        "state_values_T": torch.cat(batch["state_values"]),
        "advantages_T": torch.cat(batch["advantages"]),
        "response_mask_T": masks,
        "layout": PackedLayout.whole(lengths),
    }
    policy_T = dataclasses.replace(method, terms=())(**given).loss_T
    result = method(**given)
    penalty_T = result.loss_T - policy_T if method.terms else torch.zeros_like(policy_T)
    weights = kept = [torch.ones_like(sample) for sample in current]
    counted = batch["loss_masks"]
    if "use_tis" in options:
        trainer = batch["log_probs"] if "proximal" in method.policies else [sample.detach() for sample in current]
        weights, kept = correction_of(options, trainer, batch)
        counted = [mask * keep for mask, keep in zip(counted, kept, strict=True)]
        if options["tis_level"] == "none":
            weights = [torch.ones_like(sample) for sample in current]
    # What the method rejects has neither a KL nor an entropy term.
    kept_of_method = result.kept_T.split(lengths)
    counted = [
        mask * (keep | ~valid)
        for mask, keep, valid in zip(counted, kept_of_method, result.valid_T.split(lengths), strict=True)
    ]
    host = [1.0 if args.calculate_per_token_loss else float(n) for n in batch["rollout_mask_sums"].clamp_min(1.0)]
    of_policy = {
        None: host,
        "sequence": [max(float(mask.sum()), 1.0) for mask in batch["loss_masks"]],
        "constant": [7.0] * len(host),
    }[options.get("mis_loss_denominator")]
    total = torch.zeros((), dtype=torch.float64)
    parts = [part.split(lengths) for part in (policy_T, penalty_T)]
    for i in range(len(lengths)):
        distance = current[i] - batch["ref_log_probs"][i]
        other = args.kl_loss_coef * ((-distance).exp() - 1 + distance) - args.entropy_coef * entropies[i]
        total = total + ((weights[i].double() * parts[0][i] + parts[1][i]) * kept[i]).sum() / of_policy[i]
        total = total + (other * counted[i]).sum() / host[i]
    return total


@each_method
def test_the_key_is_the_method_with_whatever_goes_with_it(name) -> None:
    batch = loss_cases.local_batch(batch_of())
    options = drawn_options(name)
    loss, metrics, gradient = computed(key_of(name) | options)
    logits = batch["logits"].clone().requires_grad_()
    wanted = written_out(name, options, batch, logits)
    (wanted_gradient,) = torch.autograd.grad(wanted, logits)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-6, atol=1e-8)
    assert gradient.abs().sum() > 0.0
    assert {"pg_loss", "pg_clipfrac", "ppo_kl"} <= {*metrics}


@dataclasses.dataclass
class Shared(method_losses.Data):
    """Tokens of which each counts with a share of its own."""

    shares: torch.Tensor | None = None

    def total(self, objective):
        return -(self.shares * objective)[..., self.valid].sum(-1)


@pytest.mark.parametrize("correction", [{}, GATES_ALONE], ids=["alone", "gates"])
@each_method
def test_tokens_of_a_response_may_differ_in_advantage_mask_and_rejection(name, correction) -> None:
    """The gradient is that of the paper's formula, each token of the sum times its mask, 0 where it is rejected."""
    batch = loss_cases.local_batch(batch_of())
    generator = torch.Generator().manual_seed(3)
    batch["loss_masks"] = [
        mask * torch.randint(1, 17, mask.shape, generator=generator) / 8.0 for mask in batch["loss_masks"]
    ]
    lengths = batch["response_lengths"]
    logits = batch["logits"].clone().requires_grad_()
    x = torch.cat(log_probs_of(logits, batch, 1.0)[0])
    masks = torch.cat(batch["loss_masks"])
    counted = masks
    if correction:
        uses_proximal = "proximal" in METHODS[name].method.policies
        counted = torch.cat(
            correction_of(correction, batch["log_probs"] if uses_proximal else [*x.split(lengths)], batch)[1]
        )
        assert 0 < int((counted != 0).sum()) < int((masks != 0).sum())
    divisors = batch["rollout_mask_sums"].clamp_min(1.0).repeat_interleave(torch.tensor(lengths))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    places = [s + mask.nonzero().flatten() for s, mask in zip(starts, batch["loss_masks"], strict=True)]
    streams = {"behavior": "rollout_log_probs", "proximal": "log_probs", "reference": "ref_log_probs"}
    streams |= {"advantages": "advantages", "values": "state_values"}
    data = Shared(
        x=x.detach(),
        sequences=[tokens for tokens in places if len(tokens)],
        shares=counted.double() / divisors,
        **{field: torch.cat(batch[key]).double() for field, key in streams.items()},
    )
    numbers = parameters(name) | OWN.get(name, {})
    wanted = getattr(method_losses, name)(x[None], data, **numbers).sum()
    (wanted_gradient,) = torch.autograd.grad(wanted, logits)
    _, _, gradient = computed(key_of(name) | correction, batch)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=1e-6, atol=1e-8)


# What a method does token by token is the same code for all: of those one in four.
OF_SEQUENCES = [name for name, row in METHODS.items() if not row.method.is_of_tokens]
OF_TOKENS = [name for name in METHODS if name not in OF_SEQUENCES]


@pytest.mark.parametrize("name", [*OF_SEQUENCES, *OF_TOKENS[::4]])
def test_context_parallel_ranks_give_the_loss_of_one(name) -> None:
    # A method sees nothing of padding, which test_policy_loss_ranks has.
    keys = key_of(name) | drawn_options(name)
    batch = batch_of()
    whole = computed(keys, loss_cases.local_batch(batch))

    def on_rank(rank: Rank) -> tuple:
        local = loss_cases.local_batch(batch, cp_rank=rank.cp_rank, cp_size=4)
        return computed(keys, local, host=Host(rank.groups, plain_scores))

    parts = run_ranks(on_rank, cp_size=4)
    for part in parts:
        if isinstance(part, Exception):
            raise part
    totals = {key: sum(part[1][key] for part in parts) for key in whole[1]}
    torch.testing.assert_close(totals, whole[1], rtol=1e-6, atol=1e-7)
    rows = whole[2][0].split(loss_cases.TOTALS)
    for rank, (_, _, gradient) in enumerate(parts):
        cut = [loss_cases.local_rows(x, cp_rank=rank, cp_size=4, length=len(x)) for x in rows]
        torch.testing.assert_close(gradient, torch.cat(cut)[None], rtol=1e-6, atol=1e-8)


OF_THE_BATCH = {
    name: [key_of(name)] for name, row in METHODS.items() if row.method.averages_over_batch and name != "vaco"
} | {"vaco": [key_of("vaco") | {"mis_loss_method": {"name": "vaco", "delta": x}} for x in (0.061, 0.0615, 0.0622)]}
"""vaco is armed or not. The mean that it looks at is 0.0619 of all samples, and 0.0628 and 0.0612 of the two halves."""


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_a_number_of_the_batch_is_that_of_all_data_parallel_ranks(name) -> None:
    """Each rank has half of the samples, and their losses add up to that of one rank with all of them."""
    batch = batch_of()
    halves = [loss_cases.local_batch({key: value[i::2] for key, value in batch.items()}) for i in range(2)]
    is_seen = []
    for keys in OF_THE_BATCH[name]:
        wanted = computed(keys, loss_cases.local_batch(batch))[0]

        def on_rank(rank: Rank, keys=keys) -> tuple:
            return computed(keys, halves[rank.dp_rank], host=Host(rank.groups, plain_scores))

        parts = run_ranks(on_rank, dp_size=2)
        torch.testing.assert_close(sum(part[0] for part in parts), wanted, rtol=1e-6, atol=1e-8)
        alone = sum(computed(keys, half)[0] for half in halves)
        is_seen.append(not torch.allclose(alone, wanted, rtol=1e-4))
    assert any(is_seen)


def test_the_kept_tokens_of_a_denominator_are_those_of_the_method_too() -> None:
    """Neither what the gate nor what the method rejects counts."""
    keys = UNSET | GATES_ALONE | {"mis_loss_method": {"name": "token_mis", "low": 0.9, "high": 1.1}}
    batch = batch_of()
    _, kept = correction_of(keys, batch["log_probs"], batch)
    current, _ = log_probs_of(loss_cases.local_batch(batch)["logits"], batch, 1.0)
    wanted, num_by_method = torch.zeros(()).double(), 0
    for i, gated in enumerate(kept):
        ratio = (batch["log_probs"][i] - batch["rollout_log_probs"][i]).double().exp()
        both = gated * ((ratio >= 0.9) & (ratio <= 1.1))
        num_by_method += int(gated.sum() - both.sum())
        update, advantage = (current[i] - batch["log_probs"][i]).exp(), batch["advantages"][i]
        gain = ratio * torch.minimum(update * advantage, update.clamp(0.8, 1.2) * advantage)
        divisor = batch["rollout_mask_sums"][i].clamp_min(1) * both.sum() / batch["loss_masks"][i].sum()
        wanted -= (gain * both).sum() / divisor if both.any() else 0.0
    assert num_by_method
    found, _, _ = computed(keys | KEPT)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-8)


def test_the_kept_tokens_of_a_denominator_count_as_much_as_their_mask_says() -> None:
    keys = UNSET | KEPT | {"mis_loss_method": {"name": "token_mis", "low": 0.9, "high": 1.1}}
    batch = loss_cases.local_batch(batch_of())
    halved = batch | {"loss_masks": [mask * 0.5 for mask in batch["loss_masks"]]}
    torch.testing.assert_close(computed(keys, halved)[0], computed(keys, batch)[0] / 2.0, rtol=1e-6, atol=1e-8)


def test_a_denominator_of_kept_tokens_needs_no_filter_beside_a_method_that_rejects_tokens() -> None:
    keys = UNSET | {"mis_loss_method": {"name": "token_mis", "low": 0.9, "high": 1.1}}
    assert computed(keys | KEPT)[0] != computed(keys)[0]
    for name in ("segment_rs", "opsm"):
        assert computed(UNSET | KEPT | {"mis_loss_method": name})[0].isfinite()


@pytest.mark.parametrize("name", ["token_mis", "icepop", "mis_po"])
def test_the_clip_fraction_counts_what_the_methods_masks_stop(name) -> None:
    """Whether a masked token leaves the mask or stays; and with no clip of a ratio beside."""
    batch = loss_cases.local_batch(batch_of())
    keys = {"mis_loss_method": {"name": name, "low": 0.9, "high": 1.1}, "use_rollout_logprobs": name == "mis_po"}
    if name == "mis_po":
        keys["mis_loss_method"] |= {"low_sequence": 0.0, "high_sequence": 1e6}
    current, _ = log_probs_of(batch["logits"], batch, 1.0)
    wanted = 0.0
    for i, mask in enumerate(batch["loss_masks"]):
        upper = current[i] if name == "mis_po" else batch["log_probs"][i]
        ratio = (upper - batch["rollout_log_probs"][i]).exp()
        stopped = (ratio < 0.9) | (ratio > 1.1)
        if name != "mis_po":
            update, advantage = (current[i] - batch["log_probs"][i]).exp(), batch["advantages"][i]
            stopped |= ((update > 1.2) & (advantage > 0)) | ((update < 0.8) & (advantage < 0))
        wanted += float((stopped & (mask != 0)).sum()) / float(batch["rollout_mask_sums"][i].clamp_min(1))
    assert float(computed(UNSET | keys)[1]["pg_clipfrac"]) == pytest.approx(wanted, rel=1e-6)
    assert wanted > 0.0


# --- what is the same by another name


def assert_same(one: tuple, other: tuple) -> None:
    # The weights of the hook are float32: what is left of a sum of few of them differs by some of its roundings.
    torch.testing.assert_close((one[0], one[2]), (other[0], other[2]), rtol=5e-7, atol=1e-9)


def test_rejected_tokens_leave_the_methods_own_penalty() -> None:
    keys = key_of("kimi_k2_5") | {"use_rollout_logprobs": True}
    everything = GATES_ALONE | {"rs_lower_bound": 0.9999, "rs_upper_bound": 1.0001}
    loss, _, gradient = computed(keys | everything)
    assert float(loss) == 0.0
    assert not gradient.any()


# --- what is refused


REFUSED = [
    ("icepops", "mis_loss_method: unknown method 'icepops' (did you mean 'icepop'"),
    ({"low": 0.5}, "mis_loss_method must be the name of a method, or a mapping with the key name"),
    (3, "mis_loss_method must be a mapping, got 3"),
    ({"name": "icepop", "hihg": 2.0}, "unknown parameters of mis_loss_method: icepop: 'hihg' (did you mean 'high'?)"),
    ({"name": "icepop", "high": "5e-1"}, "mis_loss_method: icepop: high must be a number in [1, inf), got '5e-1'"),
    ({"name": "clip_cov", "seed": 1.5}, "seed must be a whole number, got 1.5"),
    ({"name": "maspo", "scale": 20.0}, "maspo: high (from scale: 20.0) must be in [20, inf), got 10.0"),
    (
        {"name": "icepop", "normalize_over": "token"},
        "mis_loss_method: icepop: normalize_over must be one of tokens | all_tokens | sequences, got 'token'",
    ),
    ({"name": "dispo", "positive": [2.0]}, "positive must be a list of 2 numbers, got [2.0]"),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_method_that_is_misspelt_is_refused_by_name(value, message) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        computed(UNSET | {"mis_loss_method": value})


REPLACED = [
    ({"mis_loss_mode": "baseline"}, "mis_loss_mode='baseline': no effect, because mis_loss_method: gmpo defines"),
    ({"eps_clip": 0.1}, "eps_clip=0.1: no effect, because mis_loss_method: gmpo defines the loss"),
    ({"eps_clip_high": 0.28}, "eps_clip_high=0.28: no effect"),
    ({"eps_clip_c": 3.0}, "eps_clip_c=3.0: no effect"),
    ({"advantage_estimator": "gspo"}, "advantage_estimator='gspo': no effect"),
    ({"advantage_estimator": "cispo"}, "advantage_estimator='cispo': no effect"),
    (
        {"use_rollout_logprobs": True},
        "mis_loss_method: gmpo compares with the proximal policy, which --use-rollout-logprobs",
    ),
    ({"loss_type": "policy_loss"}, "mis_loss_method='gmpo': no effect, because --loss-type is policy_loss"),
    ({"mis_loss_metod": "gmpo"}, "did you mean 'mis_loss_method'"),
]


@pytest.mark.parametrize(("keys", "message"), REPLACED, ids=lambda value: str(value)[:40])
def test_flags_that_a_method_replaces_are_refused_by_name(keys, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        computed(UNSET | {"mis_loss_method": "gmpo"} | keys)


def test_the_clip_that_a_host_sets_by_itself_is_no_flag_of_the_user() -> None:
    plain = computed({"mis_loss_method": "gmpo"} | UNSET)
    # slime copies eps_clip where eps_clip_high is not set.
    assert torch.equal(plain[2], computed({"mis_loss_method": "gmpo", "eps_clip": 0.2, "eps_clip_high": 0.2})[2])


def test_a_weight_between_the_engines_is_not_counted_twice() -> None:
    method = {"mis_guard": "error", "mis_loss_method": "dppo_tv", "use_rollout_logprobs": True}
    keys = UNSET | HOOK | method
    with pytest.raises(ValueError, match=r"method: dppo_tv already corrects for the behavior policy: .* none") as error:
        computed(keys)
    assert len(str(error.value)) <= 240
    with pytest.warns(UserWarning, match="already corrects"):
        computed(keys | {"mis_guard": "warn"})
    computed(UNSET | GATES_ALONE | method)
    # A term that compares with the behavior policy is no weight.
    for name in ("grpo_unbiased_kl", "dro"):
        computed(UNSET | HOOK | {"mis_guard": "error", "mis_loss_method": name})


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("icepop", "rollout_log_probs", "with which mis_loss_method: icepop compares"),
        ("grpo_k3", "ref_log_probs", "with which mis_loss_method: grpo_k3 compares"),
        (
            "drift_control",
            "state_values",
            "no flag of slime or Miles gives them; a batch of make_loss_func may have them",
        ),
    ],
)
def test_what_the_host_has_not_is_refused_with_what_gives_it(name, missing, message) -> None:
    batch = loss_cases.local_batch(batch_of()) | {missing: None}
    with pytest.raises(ValueError, match=re.escape(message)):
        computed(UNSET | {"mis_loss_method": name, "use_rollout_logprobs": name == "drift_control"}, batch)


def test_two_penalties_against_the_reference_policy_are_refused() -> None:
    keys = UNSET | {"mis_loss_method": "grpo_k3", "use_kl_loss": True, "kl_loss_type": "k3"}
    with pytest.raises(ValueError, match=r"kl_loss_coef=0\.1: mis_loss_method: grpo_k3 has this penalty"):
        computed(keys | {"kl_loss_coef": 0.1})
    assert_same(computed(keys | {"kl_loss_coef": 0.0}), computed(UNSET | {"mis_loss_method": "grpo_k3"}))


@pytest.mark.parametrize("name", ["dppo_tv", "reinforce"])
def test_a_pass_that_the_method_does_not_look_at_is_said(name) -> None:
    with pytest.warns(UserWarning, match=f"mis_loss_method: {name} does not use .* --use-rollout-logprobs"):
        with_pass = computed(UNSET | {"mis_loss_method": name})
    assert torch.equal(with_pass[2], computed(UNSET | {"mis_loss_method": name, "use_rollout_logprobs": True})[2])


def test_settings_with_a_method_can_be_looked_up() -> None:
    one, other = (LossSettings(method=choose_method("key", {"name": "dispo", "positive": [0.5, 2]})) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
