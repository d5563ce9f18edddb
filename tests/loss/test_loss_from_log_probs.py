# SPDX-License-Identifier: Apache-2.0
"""The whole loss from log-probs, padded and packed, is the one from logits."""

import math

import loss_cases
import pytest
import torch
from loss_cases import GATES, GATES_ALONE, HOOK, KL
from rows import for_each
from test_policy_loss_methods import KEPT, UNSET, batch_of, key_of
from test_policy_loss_modes import PLAIN, log_probs_of
from thread_ranks import Rank, run_ranks
from zigzag import take

import mis_ext
from mis_ext import PackedLayout
from mis_ext.hosts.megatron import batch_loss
from mis_ext.hosts.session import current_run
from mis_ext.methods import METHODS

STREAMS = {
    "behavior_logprobs": "rollout_log_probs",
    "proximal_logprobs": "log_probs",
    "reference_logprobs": "ref_log_probs",
    "advantages": "advantages",
    "state_values": "state_values",
}
OPTIONS = {
    "ppo": {},
    "gates, kl, entropy": GATES | KL | {"kl_loss_type": "k3", "entropy_coef": 0.1},
    "tokens": HOOK | {"calculate_per_token_loss": True},
    "sequence denominators": GATES | {"mis_loss_denominator": "sequence"},
    "measured": {"get_mismatch_metrics": True, "use_tis": False, "mis_guard": "warn", "mis_metrics": "all"},
    "dppo": key_of("dppo_tv"),
    "gspo": key_of("gspo"),
    "drift": key_of("drift_control"),
    "kept by method": UNSET | KEPT | {"mis_loss_method": {"name": "token_mis", "low": 0.9, "high": 1.1}},
}
WIDTH = 15


def samples_of(batch: dict) -> dict[str, list[torch.Tensor]]:
    """Per sample, by the names of the arguments."""
    current, entropies = log_probs_of(torch.cat(batch["logits"])[None], batch, 1.0)
    given = {name: batch[key] for name, key in STREAMS.items()}
    masks = {"response_mask": batch["loss_masks"]}
    return given | masks | {"current_logprobs": current, "entropy": entropies}


def padded(samples: dict, *, side: str = "right", garbage: float = 0.0) -> dict[str, torch.Tensor]:
    found = {}
    for name, rows in samples.items():
        fill = 0 if name == "response_mask" else garbage
        found[name] = torch.full((len(rows), WIDTH), fill, dtype=rows[0].dtype)
        for row, sample in zip(found[name], rows, strict=True):
            place = slice(len(sample)) if side == "right" else slice(WIDTH - len(sample), WIDTH)
            row[place] = sample
    return found


def computed(keys: dict, given: dict, **more) -> tuple:
    """Loss and metrics, and the gradients in log-probs and entropy."""
    given = dict(given)
    leaves = []
    for name in ("current_logprobs", "entropy"):
        if given[name] is not None:
            given[name] = given[name].clone().requires_grad_()
            leaves.append(given[name])
    found = mis_ext.policy_loss_from_log_probs(loss_cases.host_args(**keys), **given, **more)
    gradients = torch.autograd.grad(found.total, leaves, allow_unused=True)
    return found, gradients


def from_logits(keys: dict, batch: dict):
    local = loss_cases.local_batch(batch)
    logits = local.pop("logits")
    return batch_loss(current_run(loss_cases.host_args(**keys), whole_loss=True), PLAIN, local, logits)


@pytest.mark.parametrize("garbage", [0.0, float("nan")])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", OPTIONS)
def test_padded_and_packed_are_the_loss_from_logits(name, side, garbage) -> None:
    batch = batch_of()
    del batch["opd_reverse_kl"]
    keys = OPTIONS[name]
    wanted = from_logits(keys, batch)
    samples = samples_of(batch)
    given = padded(samples, side=side, garbage=garbage)
    divisors = batch["rollout_mask_sums"]
    found, gradients = computed(keys, given, divisors=divisors)
    layout = PackedLayout.whole(batch["response_lengths"])
    packed, of_packed = computed(
        keys, {key: torch.cat(rows) for key, rows in samples.items()}, layout=layout, divisors=divisors
    )
    for each in (found, packed):
        torch.testing.assert_close(each.total, wanted.loss, rtol=1e-6, atol=1e-8)
        assert [*each.metrics] == [*wanted.metrics]
        for key, metric in each.metrics.items():
            torch.testing.assert_close(metric.total, wanted.metrics[key], rtol=1e-5, atol=1e-7, equal_nan=True, msg=key)
    for row, one in zip(gradients, of_packed, strict=True):
        if one is None:
            assert row is None
            continue
        cut = padded({"x": list(one.split(batch["response_lengths"]))}, side=side)["x"]
        torch.testing.assert_close(row, cut, rtol=1e-6, atol=1e-9)
        assert cut.abs().sum() > 0.0


@pytest.mark.parametrize("name", ["gates, kl, entropy", "tokens", "gspo", "kept by method"])
def test_context_parallel_ranks_add_up_to_one(name) -> None:
    batch = batch_of()
    samples, totals = samples_of(batch), batch["total_lengths"]
    keys, mask = OPTIONS[name], torch.cat(samples.pop("response_mask"))
    whole = PackedLayout.whole(batch["response_lengths"])
    alone, _ = computed(keys, {key: torch.cat(rows) for key, rows in samples.items()}, layout=whole, response_mask=mask)

    def on_rank(rank: Rank) -> tuple:
        place = {"cp_rank": rank.cp_rank, "cp_size": 2}
        given = {key: torch.cat(take(rows, total_lengths=totals, **place)) for key, rows in samples.items()}
        layout = PackedLayout.context_parallel(batch["response_lengths"], total_lengths=totals, **place)
        return computed(keys, given, layout=layout, response_mask=mask, groups=rank.groups)[0]

    parts = run_ranks(on_rank, cp_size=2)
    assert [part for part in parts if isinstance(part, Exception)] == []
    torch.testing.assert_close(sum(part.total for part in parts), alone.total, rtol=1e-6, atol=1e-8)
    assert float(sum(part.num_terms for part in parts)) == float(alone.num_terms)


@for_each("name", METHODS)
def test_a_method_needs_the_tensors_that_it_declares_and_no_other(name) -> None:
    keys, method = {"mis_loss_method": name} | UNSET, METHODS[name].method
    samples = samples_of(batch_of())
    given = {key: torch.cat(rows) for key, rows in samples.items()} | {"entropy": None}
    layout = PackedLayout.whole([len(row) for row in samples["response_mask"]])
    declared = [f"{policy}_logprobs" for policy in method.policies]
    declared += ["state_values"] * method.needs_state_values
    least = {key: given[key] for key in ("entropy", "advantages", "response_mask", *declared)}
    wanted, gradients = computed(keys, given, layout=layout)
    found, same = computed(keys, least, layout=layout)
    torch.testing.assert_close((found.total, *same), (wanted.total, *gradients), rtol=0.0, atol=0.0)
    for key in set(declared) - {"current_logprobs", "proximal_logprobs"}:
        with pytest.raises(ValueError, match=f"{key} are missing"):
            computed(keys, least | {key: None}, layout=layout)


def test_the_mean_is_over_sequences_with_a_response_or_over_tokens() -> None:
    batch = batch_of()
    given = padded(samples_of(batch))
    own = torch.tensor([float(mask.sum()) for mask in batch["loss_masks"]])
    found, _ = computed({}, given)
    # The last response is masked as a whole.
    assert float(found.num_terms) == 5.0 == float((own > 0).sum())
    per_token, _ = computed({"calculate_per_token_loss": True}, given)
    assert float(per_token.num_terms) == float(own.sum())
    torch.testing.assert_close(per_token.mean * own.sum(), per_token.total)
    torch.testing.assert_close(found.mean * 5.0, found.total)
    nothing, _ = computed({}, given | {"response_mask": torch.zeros_like(given["response_mask"])})
    assert nothing.mean.detach() == 0.0


def test_an_entropy_that_nobody_gave_is_no_metric() -> None:
    given = padded(samples_of(batch_of()))
    found, _ = computed({}, given)
    assert float(found.metrics["entropy_loss"].value()) > 0.0
    del given["entropy"]
    alone = mis_ext.policy_loss_from_log_probs(loss_cases.host_args(), **given)
    assert alone.metrics.keys() == found.metrics.keys() - {"entropy_loss"}


def test_an_advantage_of_each_row_is_that_of_its_tokens() -> None:
    given = padded(samples_of(batch_of()))
    rows = torch.tensor([1.0, -1.0, 0.5, -0.5, 2.0, 1.0], dtype=torch.float64)
    wanted, _ = computed({}, given | {"advantages": rows[:, None].expand(-1, WIDTH)})
    found, _ = computed({}, given | {"advantages": rows})
    assert torch.equal(found.total, wanted.total)


def test_without_a_scoring_pass_the_current_policy_is_the_proximal_one() -> None:
    given = padded(samples_of(batch_of()))
    proximal = given["current_logprobs"].detach()
    found, _ = computed({}, given | {"proximal_logprobs": None})
    wanted, _ = computed({}, given | {"proximal_logprobs": proximal})
    assert torch.equal(found.total, wanted.total)
    # What is only measured may be missing.
    measured, _ = computed(OPTIONS["measured"], given | {"proximal_logprobs": None, "behavior_logprobs": None})
    assert torch.equal(measured.total, wanted.total)
    # No term of a mean over calls: neither without behavior log-probs nor where no token of the group is open.
    assert measured.metrics["mis_kl"].value().isnan()
    assert measured.metrics["mis_kl"].count == 0.0
    on_policy, _ = computed(OPTIONS["measured"], given | {"behavior_logprobs": given["proximal_logprobs"]})
    assert on_policy.metrics["mis_raised_fraction"].count == 0.0


@pytest.mark.parametrize(
    ("keys", "change", "message"),
    [
        ({}, {"behavior_logprobs": torch.zeros(3)}, r"behavior_logprobs has shape \[3\], current_logprobs \[6, 15\]"),
        ({}, {"response_mask": torch.ones(6, 3)}, r"response_mask has \[6, 3\]: both must be \[B, L\]"),
        ({}, {"layout": PackedLayout.whole([90]), "response_mask": torch.ones(89)}, "response_mask has 89 tokens, but"),
        ({}, {"divisors": torch.ones(2)}, r"divisors has shape \[2\], but there are 6 sequences"),
        (HOOK, {"behavior_logprobs": None}, "behavior_logprobs are missing: the correction needs them"),
        (key_of("dppo_tv"), {"behavior_logprobs": None}, "are missing, with which mis_loss_method: dppo_tv compares"),
        (KL, {"reference_logprobs": None}, "reference_logprobs are missing, with which --use-kl-loss compares"),
        (key_of("drift_control"), {"state_values": None}, "state_values are missing, by which mis_loss_method: drift"),
        ({"entropy_coef": 0.1}, {"entropy": None}, "entropy is missing: entropy_coef=0.1 needs it"),
        ({"custom_pg_loss_reducer_function_path": "a.b"}, {}, "use mis_loss_denominator"),
        (UNSET | {"mis_loss_method": "ppa"}, {}, "unknown method 'ppa' .did you mean 'ppo'"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(keys, change, message) -> None:
    given = padded(samples_of(batch_of()))
    with pytest.raises(ValueError, match=message):
        computed(keys, given | change)


def sums_of(given: dict, **more) -> torch.Tensor:
    """Of each row the sum that its divisor divides, times its gradient in the log-probs."""
    return computed({}, given, divisors=torch.ones(6), **more)[1][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_every_divisor_above_0_divides(dtype) -> None:
    given = padded(samples_of(batch_of()))
    rows = sums_of(given)
    # As of prompt means: two prompts of a step of eight answers, one of them with three kept tokens.
    divisors = torch.tensor([2 * 3 / 8, 1e-6, 0.5, 1.0, 7.0, 1e6])
    divisors = divisors.to(dtype) if dtype.is_floating_point else divisors.ceil().to(dtype)
    (gradient, _) = computed({}, given, divisors=divisors)[1]
    torch.testing.assert_close(gradient, rows / divisors.double()[:, None], rtol=1e-6, atol=0.0)
    with_entropy = computed({"entropy_coef": 0.1}, given, divisors=divisors)[1][1]
    wanted = -0.1 * (given["response_mask"] != 0) / divisors.double()[:, None]
    torch.testing.assert_close(with_entropy, wanted, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("value", [0.0, -3.0, math.nan, math.inf])
def test_a_divisor_that_divides_nothing_is_refused_with_its_value(value, monkeypatch) -> None:
    given = padded(samples_of(batch_of()))
    divisors = torch.ones(6)
    keys = loss_cases.host_args()
    for _ in range(2):
        mis_ext.policy_loss_from_log_probs(keys, **given, divisors=divisors)
    divisors[2] = value
    with pytest.raises(ValueError, match=rf"divisors has values from (1|{value:g}) to (1|{value:g}): each must be"):
        mis_ext.policy_loss_from_log_probs(keys, **given, divisors=divisors)
    with monkeypatch.context() as unseen:
        # As on a GPU between two looks.
        unseen.setattr(mis_ext.Session, "check_range", lambda *_: None)
        assert mis_ext.policy_loss_from_log_probs(keys, **given, divisors=divisors).total.isnan()
    # What nothing is summed of is divided by nothing.
    given["response_mask"][2] = 0
    found, _ = computed({}, given, divisors=divisors)
    wanted, _ = computed({}, given, divisors=torch.ones(6))
    assert torch.equal(found.total, wanted.total)


@pytest.mark.parametrize("value", [-3.0, math.nan, math.inf])
@pytest.mark.parametrize("as_list", [False, True], ids=["tensor", "list"])
def test_sums_of_masks_that_are_none_are_refused_and_small_ones_are_1_as_in_the_hosts(value, as_list) -> None:
    batch = loss_cases.local_batch(batch_of())
    logits = batch.pop("logits")
    sums = torch.tensor([5.0, 1.0, 1.0, 13.0, 1.0, 1.0])

    def called(args, given: torch.Tensor) -> torch.Tensor:
        sums_given = {"rollout_mask_sums": given.tolist() if as_list else given}
        return batch_loss(current_run(args, whole_loss=True), PLAIN, batch | sums_given, logits).loss

    args = loss_cases.host_args()
    wanted = called(args, sums)
    assert torch.equal(called(args, torch.tensor([5.0, 0.5, 0.0, 13.0, 1.0, 0.0])), wanted)
    sums[2] = value
    args = loss_cases.host_args()
    with pytest.raises(ValueError, match=r"rollout_mask_sums has values from \S+ to \S+: each must be finite"):
        called(args, sums)


def test_nothing_rejected_divides_by_kept_as_by_all_where_masks_sum_to_less_than_1() -> None:
    given = padded(samples_of(batch_of()))
    given["response_mask"] = given["response_mask"] / 64.0
    # All tokens are within the bounds.
    keys = GATES_ALONE | {"rs_lower_bound": 1e-6, "rs_upper_bound": 1e6}
    found, wanted = (computed(keys | {"mis_loss_denominator": name}, given)[0] for name in ("kept", "original"))
    torch.testing.assert_close(found.total, wanted.total, rtol=1e-6, atol=0.0)


H = 6


def of_head(batch: dict, *, garbage: float = 0.0) -> dict:
    """Padded states of responses, the weight of a head, and the tokens; below the mask may be anything."""
    generator = torch.Generator().manual_seed(3)
    lengths = batch["response_lengths"]
    tokens = [sample[-length:] for sample, length in zip(batch["unconcat_tokens"], lengths, strict=True)]
    states = [torch.randn(length, H, generator=generator) for length in lengths]
    samples = samples_of(batch) | {"hidden": states, "token_ids": tokens}
    del samples["current_logprobs"], samples["entropy"]
    hidden = torch.full((len(lengths), WIDTH, H), garbage)
    for row, sample in zip(hidden, samples.pop("hidden"), strict=True):
        row[: len(sample)] = sample
    masked = padded(samples)["response_mask"] == 0
    hidden[masked] = garbage
    return padded(samples) | {"hidden": hidden, "weight": torch.randn(11, H, generator=generator)}


def from_scores(keys: dict, given: dict, temperature: float, **more):
    """The same over logits, which the caller makes."""
    hidden, weight, token_ids, rest = split(given)
    scores = mis_ext.score_tokens((hidden @ weight.T).flatten(0, -2), token_ids.reshape(-1), temperature=temperature)
    log_probs, entropy = (each.view(token_ids.shape) for each in scores)
    found = mis_ext.policy_loss_from_log_probs(
        loss_cases.host_args(**keys), current_logprobs=log_probs, entropy=entropy, **rest, **more
    )
    return found, torch.autograd.grad(found.total, (hidden, weight))


def from_hidden(keys: dict, given: dict, temperature: float | None, **more):
    hidden, weight, token_ids, rest = split(given)
    found = mis_ext.policy_loss_from_hidden(
        loss_cases.host_args(**{"rollout_temperature": temperature} | keys),
        hidden=hidden,
        weight=weight,
        token_ids=token_ids,
        temperature=temperature,
        **rest,
        **more,
    )
    return found, torch.autograd.grad(found.total, (hidden, weight))


def split(given: dict) -> tuple:
    rest = dict(given)
    hidden, weight = (rest.pop(name).detach().clone().requires_grad_() for name in ("hidden", "weight"))
    return hidden, weight, rest.pop("token_ids"), rest


def assert_same(found: tuple, wanted: tuple) -> None:
    torch.testing.assert_close(found[0].total, wanted[0].total, rtol=1e-5, atol=1e-7)
    assert [*found[0].metrics] == [*wanted[0].metrics]
    for key, metric in found[0].metrics.items():
        torch.testing.assert_close(
            metric.total, wanted[0].metrics[key].total, rtol=1e-4, atol=1e-6, equal_nan=True, msg=key
        )
    for own, other in zip(found[1], wanted[1], strict=True):
        assert other.abs().sum() > 0.0
        torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", OPTIONS)
def test_hidden_states_give_the_loss_over_their_logits(name) -> None:
    batch = batch_of()
    del batch["opd_reverse_kl"]
    more = {"divisors": batch["rollout_mask_sums"]}
    wanted = from_scores(OPTIONS[name], of_head(batch), 0.7, **more)
    # What lies below the mask, a NaN too, is not read.
    found = from_hidden(OPTIONS[name], of_head(batch, garbage=float("nan")), 0.7, **more)
    assert_same(found, wanted)


def test_the_temperature_is_that_of_the_keys() -> None:
    given = of_head(batch_of())
    wanted = from_hidden({}, given, 0.7)
    assert_same(from_hidden({"rollout_temperature": 0.7}, given, None), wanted)
    # A mapping without the key, as a trainer of one's own has it.
    hidden, weight, token_ids, rest = split(given)
    head = {"hidden": hidden, "weight": weight, "token_ids": token_ids}
    alone = mis_ext.policy_loss_from_hidden({}, **head, **rest).total
    assert torch.equal(alone, mis_ext.policy_loss_from_hidden({}, **head, **rest, temperature=1.0).total)
    # The log-prob of a token is another, and so is the term of importance sampling.
    assert not torch.equal(mis_ext.policy_loss_from_hidden({}, **head, **rest, temperature=0.7).total, alone)
    with pytest.raises(ValueError, match=r"temperature=0\.7, rollout_temperature=1: they must be equal"):
        from_hidden({"rollout_temperature": 1.0}, given, 0.7)


@pytest.mark.parametrize("name", ["gates, kl, entropy", "tokens", "kept by method"])
def test_packed_hidden_states_and_context_parallel_ranks(name) -> None:
    batch = batch_of()
    given, lengths, totals = of_head(batch), batch["response_lengths"], batch["total_lengths"]
    weight, wanted = given["weight"], from_hidden(OPTIONS[name], given, 1.0)

    def rows(key: str) -> list[torch.Tensor]:
        return [row[:length] for row, length in zip(given[key], lengths, strict=True)]

    samples = {key: rows(key) for key in given if key not in ("weight", "response_mask")}
    mask = torch.cat(rows("response_mask"))

    def on_rank(rank: Rank) -> tuple:
        place = {"cp_rank": rank.cp_rank, "cp_size": 2}
        mine = take([torch.arange(length) for length in lengths], total_lengths=totals, **place)
        own = {
            key: torch.cat([sample[part] for sample, part in zip(each, mine, strict=True)])
            for key, each in samples.items()
        }
        layout = PackedLayout.context_parallel(lengths, total_lengths=totals, **place)
        own |= {"weight": weight, "response_mask": mask}
        return from_hidden(OPTIONS[name], own, 1.0, layout=layout, groups=rank.groups)

    parts = run_ranks(on_rank, cp_size=2)
    assert [part for part in parts if isinstance(part, Exception)] == []
    torch.testing.assert_close(sum(part[0].total for part in parts), wanted[0].total, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(sum(part[1][1] for part in parts), wanted[1][1], rtol=1e-4, atol=1e-7)


def test_only_response_tokens_go_through_the_head(monkeypatch) -> None:
    from mis_ext.hosts import whole_loss

    seen, score = [], whole_loss.score_hidden

    def counted(hidden, weight, token_T, **given):
        seen.append(len(token_T))
        return score(hidden, weight, token_T, **given)

    monkeypatch.setattr(whole_loss, "score_hidden", counted)
    given = of_head(batch_of())
    from_hidden({}, given, 1.0)
    assert seen == [int((given["response_mask"] != 0).sum())]
    assert seen[0] < given["token_ids"].numel()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.zeros(2, 3, dtype=torch.int64)}, "each token needs one state"),
        ({"weight": torch.zeros(11, H + 1)}, "weight must be"),
        ({"head": {"bias": torch.zeros(10)}}, "bias has shape"),
    ],
)
def test_what_does_not_fit_a_head_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        from_hidden({}, of_head(batch_of()) | change, 1.0)
