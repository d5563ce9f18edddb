# SPDX-License-Identifier: Apache-2.0
"""Calls of the full policy loss: what it refuses, recomputation, synchronizations, and a plain Megatron-Core loop."""

import re
import warnings
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import loss_cases
import pytest
import torch
from loss_cases import GATES, HOOK, KL
from synchronization import recorded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import mis_ext
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.megatron import batch_loss
from mis_ext.hosts.session import current_run
from mis_ext.hosts.slime_miles import policy_loss as hosts
from mis_ext.keys.reading import read_config
from mis_ext.keys.rows import ARGUMENTS, ROWS
from mis_ext.loss.objective import bounds_of
from mis_ext.loss.policy import MILES_METRICS
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.method import LossOfSlopes

BEHAVIOR = {"use_rollout_logprobs": True}


def local(**more) -> dict:
    return loss_cases.local_batch(loss_cases.whole_batch()) | more


def called(keys: dict, batch: dict | None = None, *, function=None):
    batch = dict(local() if batch is None else batch)
    logits = batch.pop("logits").clone().requires_grad_()
    args = loss_cases.host_args(**keys)
    loss, metrics = (function or mis_ext.policy_loss)(args, batch, logits)
    (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), metrics, gradient


REFUSED = [
    (
        {"mis_loss_mode": "by-pass"},
        "mis_loss_mode must be one of baseline | decoupled | bypass | reinforce, got 'by-pass'",
    ),
    ({"mis_loss_mode": "decoupled"}, "mis_loss_mode: decoupled needs a correction: set use_tis: true"),
    ({"mis_loss_mode": "reinforce"}, "mis_loss_mode: reinforce needs a correction"),
    ({"mis_loss_mode": "decoupled"} | HOOK | BEHAVIOR, "drop the flag, or use mis_loss_mode: bypass"),
    (
        {"mis_loss_mode": "reinforce", "advantage_estimator": "gspo"} | HOOK,
        "estimator='gspo': no effect, because mis",
    ),
    (
        {"mis_loss_mode": "reinforce", "eps_clip_c": 3.0} | HOOK,
        "eps_clip_c=3.0: no effect, because mis_loss_mode: r",
    ),
    ({"advantage_estimator": "cispo", "eps_clip_c": 3.0}, "because --advantage-estimator cispo has no dual clip"),
    (HOOK | BEHAVIOR | {"mis_guard": "error"}, "corrects the mismatch twice"),
    ({"eps_clip": -0.1}, r"eps_clip must be in \[0, inf\], got -0.1"),
    ({"eps_clip": "0.1"}, "eps_clip must be a number"),
    ({"eps_clip_high": -0.1}, "eps_clip_high must be in"),
    ({"eps_clip_c": 1.0}, r"eps_clip_c must be in \(1, inf\], got 1.0"),
    ({"entropy_coef": float("nan")}, "entropy_coef must be in"),
    (KL | {"kl_loss_type": "k4"}, "kl_loss_type must be one of k1 | k2 | k3 | low_var_kl, got 'k4'"),
    (KL | {"kl_loss_coef": float("inf")}, "kl_loss_coef must be in"),
    ({"mis_loss_unbiased_kl": True}, "mis_loss_unbiased_kl=True: no effect, because --use-kl-loss is not set"),
    ({"mis_loss_kl_tokens": "all"}, "mis_loss_kl_tokens='all': no effect"),
    (KL | {"mis_loss_kl_tokens": "some"}, r"mis_loss_kl_tokens must be one of kept | all, got 'some'"),
    ({"mis_loss_entropy_tokens": "some"}, "mis_loss_entropy_tokens must be one of"),
    ({"rs_veto_threshold": 0.5}, "rs_veto_threshold=0.5: no effect, because use_tis is not true"),
    ({"get_mismatch_metrics": True, "tis_level": "geometric"}, "tis_level='geometric': no effect, because use_tis"),
    ({"mis_staleness": True}, "mis_staleness=True: no effect, because neither use_tis nor get_mismatch_metrics"),
    ({"mis_loss_entropy_tokens": "all", "entropy_coef": 0.1}, "no effect, because nothing rejects a token"),
    (KL | {"mis_loss_kl_tokens": "all"}, "no effect, because nothing rejects a token"),
    ({"mis_loss_denominator": "kept"}, "mis_loss_denominator='kept': no effect, because no response keeps"),
    (HOOK | {"mis_loss_denominator": "kept", "rs_veto_threshold": 0.5}, "mis_loss_denominator='kept': no effect"),
    *(
        ({"mis_loss_denominator": "kept", "mis_loss_method": method}, "mis_loss_denominator='kept': no effect")
        for method in ("sequence_mis", "geometric_rs", "trm", "veto")
    ),
    (KL | {"mis_loss_unbiased_kl": True, "use_unbiased_kl": True}, "mis_loss_unbiased_kl .* are two ratios; drop one"),
    ({"mis_loss_denominator": "tokens"}, "mis_loss_denominator must be one of original | kept | sequence | constant"),
    ({"mis_loss_denominator": "constant"}, "needs mis_loss_constant, a number of tokens"),
    ({"mis_loss_denominator": "constant", "mis_loss_constant": 0.0}, r"mis_loss_constant must be in \(0, inf\)"),
    ({"mis_loss_constant": 8.0}, "mis_loss_constant=8.0: no effect, because mis_loss_denominator is original"),
    ({"mis_loss_denominator": "kept", "calculate_per_token_loss": True}, "use mis_denominator: kept"),
    ({"mis_loss_denominator": "kept", "mis_denominator": "kept"} | HOOK, "are two denominators: drop one of them"),
    (
        {"mis_loss_denominator": "sequence", "custom_pg_loss_reducer_function_path": "loss_cases.reduce_by_kept"},
        "mis_loss_denominator='sequence': no effect, because --custom-pg-loss-reducer",
    ),
    (HOOK | {"custom_tis_function_path": "others.hook"}, "others.hook: mis_ext.policy_loss calls"),
    (HOOK | {"tis_clip": 3.0}, "tis_clip=3.0: no effect, because it belongs to the framework's built-in correction"),
    (HOOK | {"tis_clip_low": 0.5}, "tis_clip_low=0.5: no effect.*tis_mode: clip with tis_lower_bound"),
    ({"use_opsm": True, "opsm_delta": "1e-4"}, "opsm_delta must be a number"),
    ({"mis_loss_mode": ["bypass"]}, r"mis_loss_mode must be one of .* got \['bypass'\]"),
    ({"mis_los_mode": "bypass"}, "did you mean 'mis_loss_mode'"),
    (
        {"mis_loss_mode": "bypass", "loss_type": "policy_loss"},
        "mis_loss_mode='bypass': no effect, because --loss-type is pol",
    ),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_what_cannot_be_honoured_is_refused_by_name(keys, message) -> None:
    with pytest.raises((ValueError, TypeError), match=message.replace(" | ", r" \| ")):
        called(keys)


def test_what_the_correction_refuses_the_loss_refuses_too() -> None:
    with pytest.raises(ValueError, match="tis_level must be one of") as error:
        called(HOOK | {"tis_level": "tokens", "mis_loss_constant": 8.0, "mis_loss_denominator": "original"})
    assert "mis_loss_constant=8.0: no effect" in str(error.value)
    # Whether these have an effect, only legal keys of a correction say.
    with pytest.raises(ValueError, match="tis_level must be one of") as error:
        called(HOOK | KL | {"tis_level": "tokens", "mis_loss_kl_tokens": "all", "mis_loss_denominator": "kept"})
    assert "no effect" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        ({"mis_loss_mode": "bypass"} | BEHAVIOR, "rollout_log_probs", "with which mis_loss_mode: bypass compares"),
        (BEHAVIOR, "rollout_log_probs", "with which --use-rollout-logprobs compares"),
        (KL | {"mis_loss_unbiased_kl": True}, "rollout_log_probs", "with which mis_loss_unbiased_kl compares"),
        (
            HOOK | {"mis_guard": "error"},
            "rollout_log_probs",
            "rollout_log_probs are missing: the rollout function must store",
        ),
        (KL, "ref_log_probs", "--ref-load makes the framework score them.*with which --use-kl-loss compares"),
    ],
)
@pytest.mark.parametrize("missing", [None, []])
def test_missing_log_probs_are_named(keys, key, message, missing) -> None:
    with pytest.raises(ValueError, match=message):
        called(keys, local(**{key: missing}))


def test_without_behavior_log_probs_nothing_is_compared_with_them() -> None:
    loss, metrics, gradient = called({}, local(rollout_log_probs=None))
    assert "train_rollout_logprob_abs_diff" not in metrics
    full = called({})
    assert torch.equal(loss, full[0])
    assert torch.equal(gradient, full[2])
    measured = called({"get_mismatch_metrics": True, "mis_guard": "warn"}, local(rollout_log_probs=None))
    assert torch.equal(measured[2], gradient)
    ones = [torch.ones_like(each) for each in local()["loss_masks"]]
    unmasked = called({"get_mismatch_metrics": True}, local(rollout_log_probs=None, loss_masks=ones))
    values = [value for _, found, _ in (measured, unmasked) for name, value in found.items() if name.startswith("mis_")]
    assert torch.stack(values).isnan().all()


def test_a_reducer_gets_the_masks_of_the_framework_where_the_mismatch_is_only_measured() -> None:
    keys, batch = {"custom_pg_loss_reducer_function_path": "loss_cases.reduce_by_kept"}, local()
    # A correction masks it.
    batch["rollout_log_probs"][0][4] = torch.nan
    measured, plain = (called(keys | more, batch)[2] for more in (loss_cases.OPTIONS["metrics only"], {}))
    assert torch.equal(measured, plain)


def test_a_host_that_skips_its_pass_has_the_current_policy_as_proximal_one() -> None:
    skipped = called({"skip_actor_forward_only": True})
    absent = called({}, local(log_probs=None))
    assert torch.equal(skipped[2], absent[2])
    assert float(skipped[1]["ppo_kl"]) == 0.0 != float(called({})[1]["ppo_kl"])


def test_lengths_that_disagree_are_named() -> None:
    with pytest.raises(ValueError, match="advantages has samples of"):
        called({}, local(advantages=[torch.ones(3)] * len(loss_cases.RESPONSES)))
    with pytest.raises(ValueError, match=r"logits must be .* got shape \[\d+, 8\]"):
        called({}, local(logits=local()["logits"][0]))
    with pytest.raises(ValueError, match=r"rollout_mask_sums has shape \[2\], but there are 6 samples"):
        called({}, local(rollout_mask_sums=torch.ones(2)))


def test_denominators_come_as_a_tensor_or_a_list_or_not_at_all() -> None:
    sums = local()["rollout_mask_sums"]
    # What the framework has counted is not counted again.
    with mock.patch("mis_ext.hosts.megatron.num_tokens", side_effect=AssertionError):
        as_tensor = called({})
    for given in (list(sums.unbind()), sums.tolist(), [int(x) for x in sums]):
        assert torch.equal(called({}, local(rollout_mask_sums=given))[2], as_tensor[2])
    own = torch.stack([mask.sum() for mask in local()["loss_masks"]]).float()
    batch = local()
    del batch["rollout_mask_sums"]
    assert torch.equal(called({}, batch)[2], called({}, local(rollout_mask_sums=own))[2])


@pytest.mark.parametrize("mode", ["bypass", "reinforce"])
def test_a_pass_that_nobody_needs_is_said(mode) -> None:
    with pytest.warns(mis_ext.MismatchWarning, match=f"mis_loss_mode: {mode} does not use .* --use-rollout-logprobs"):
        with_pass = called(HOOK | {"mis_loss_mode": mode})
    without = called(HOOK | BEHAVIOR | {"mis_loss_mode": mode})
    assert torch.equal(with_pass[2], without[2])
    assert all(torch.equal(with_pass[1][name], without[1][name]) for name in without[1])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputation_gives_the_same(use_reentrant) -> None:
    keys = GATES | KL | {"kl_loss_type": "k3", "entropy_coef": 0.1}
    plain = called(keys)

    def twice(args, batch, logits):
        return checkpoint(mis_ext.policy_loss, args, batch, logits, None, use_reentrant=use_reentrant)

    again = called(keys, function=twice) if not use_reentrant else reentrant(keys, twice)
    assert torch.equal(plain[0], again[0])
    assert torch.equal(plain[2], again[2])
    assert all(torch.equal(plain[1][name], again[1][name]) for name in plain[1])


def reentrant(keys: dict, function) -> tuple:
    """Which knows `backward` only."""
    batch = local()
    logits = batch.pop("logits").clone().requires_grad_()
    loss, metrics = function(loss_cases.host_args(**keys), batch, logits)
    loss.backward()
    return loss.detach(), metrics, logits.grad


class Counted(TorchDispatchMode):
    """How many operations there were."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


def test_autograd_gets_the_loss_without_an_operation() -> None:
    """Other ranks would not learn of its error."""
    log_prob_T, slope_T = torch.zeros(3, requires_grad=True), torch.tensor([0.5, -1.0, 2.0])
    given = torch.tensor(4.0)
    with Counted() as counted:
        loss = LossOfSlopes.apply(given, log_prob_T, slope_T, None, None)
    assert counted.number == 0
    # As Megatron divides it.
    loss /= 4
    loss.backward()
    assert loss.item() == 1.0
    assert torch.equal(log_prob_T.grad, slope_T / 4)


def test_the_metrics_are_elements_of_one_tensor_on_the_host() -> None:
    _, metrics, _ = called(GATES)
    assert len({value.untyped_storage().data_ptr() for value in metrics.values()}) == 1
    assert all(value.shape == () and not value.requires_grad and not value.is_cuda for value in metrics.values())


def given_scores(unscored):
    log_probs, entropies = (torch.cat(unscored.batch[key]).requires_grad_() for key in ("current", "entropy"))
    return hosts.Scores(log_probs, entropies)


MODES = {
    "baseline": {},
    "gspo": {"advantage_estimator": "gspo", "use_opsm": True},
    "cispo": {"advantage_estimator": "cispo", "eps_clip": 1.0},
    "bypass": {"mis_loss_mode": "bypass", **BEHAVIOR},
    "reinforce": {"mis_loss_mode": "reinforce", **BEHAVIOR},
    "kept": {"mis_loss_denominator": "kept"},
} | {
    # Of tokens, of segments, with an order statistic of the batch, and with a penalty of its own.
    name: {"mis_loss_method": name, "eps_clip": 0.2, "eps_clip_high": None}
    for name in ("dispo", "segment_rs", "kl_cov")
}


@pytest.mark.parametrize("name", MODES)
def test_no_value_is_read_and_the_work_does_not_depend_on_the_number_of_samples(name, monkeypatch) -> None:
    host = hosts.Host(Groups(), given_scores, MILES_METRICS)
    args = loss_cases.host_args(**GATES | KL | {"kl_loss_type": "k3", "entropy_coef": 0.1} | MODES[name])
    counts = []
    for num_samples, length in ((40, 64), (8, 64), (24, 64)):
        batch = loss_cases.of_lengths([length] * num_samples)
        # The guards read until they have seen enough, and index tensors of new lengths are built from Python numbers.
        batch_loss(current_run(args, whole_loss=True), host, batch, batch["logits"])
        inputs = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        with recorded(monkeypatch, *inputs) as recorder:
            batch_loss(current_run(args, whole_loss=True), host, batch, batch["logits"])
        counts.append(len(recorder.names))
    assert counts[1] == counts[2]


# --- a plain Megatron-Core loop


@pytest.mark.parametrize("per_token", [False, True])
def test_a_plain_megatron_loop_trains_on_the_mean(per_token) -> None:
    keys = GATES | {"entropy_coef": 0.1, "calculate_per_token_loss": per_token}
    batch = local()
    del batch["rollout_mask_sums"]
    loss, metrics, gradient = called(keys, batch)
    logits = batch.pop("logits").clone().requires_grad_()
    loss_func = mis_ext.make_loss_func(loss_cases.host_args(**keys), batch)
    found, number, reported = loss_func(logits)
    assert number.dtype == torch.int32
    assert int(number) == (int(sum(m.sum() for m in batch["loss_masks"])) if per_token else len(loss_cases.RESPONSES))
    # One function, called twice.
    assert torch.equal(found, loss)
    # The last sample is masked as a whole: the correction measures nothing in it.
    measured = number if per_token else number - 1
    for name, (total, count) in reported.items():
        wanted = measured if name.startswith("mis_") else number
        torch.testing.assert_close((total, count), (metrics[name], wanted.float()), msg=name)
    if find_spec("megatron") is None:
        return
    config = SimpleNamespace(calculate_per_token_loss=per_token, timers=None, num_moe_experts=None, mtp_num_layers=None)
    store: list = []
    with warnings.catch_warnings():
        # Of what is not installed beside it.
        warnings.simplefilter("ignore")
        from megatron.core.pipeline_parallel.schedules import forward_step_calc_loss

        output, count = forward_step_calc_loss(
            None, logits, loss_func, config, None, False, 4, store, cp_group_size=1, is_last_stage=True
        )
    output.backward()
    assert torch.equal(count, number)
    torch.testing.assert_close(logits.grad, gradient if per_token else gradient / len(loss_cases.RESPONSES) / 4)
    assert [*store[0]] == [*metrics]


def test_padded_logits_need_no_lengths_on_one_rank() -> None:
    batch = loss_cases.local_batch(loss_cases.whole_batch(), is_padded=True)
    del batch["max_seq_lens"]
    found = called({"qkv_format": "bshd"}, batch)
    torch.testing.assert_close(found[0], called({})[0])


# --- settings


def test_every_flag_that_is_read_is_a_flag_of_the_hosts() -> None:
    names = (Path(__file__).parents[1] / "data" / "host_flags" / "names.txt").read_text().split()
    # A key of a file for our generate function, and a flag of vime.
    assert {*ARGUMENTS} - {*ROWS, *names} == {"on_policy_tokens", "use_score_centering"}


def test_unset_flags_have_the_hosts_defaults() -> None:
    assert read_config({}, whole_loss=True).whole_loss.settings == LossSettings()
    assert read_config({"use_opsm": True}, whole_loss=True).whole_loss.settings.opsm_delta == 1e-4
    written = {"mis_loss_denominator": "original", "calculate_per_token_loss": True}
    assert read_config(written, whole_loss=True).whole_loss.settings == LossSettings(per_token_loss=True)


@pytest.mark.parametrize(
    ("keys", "sums"),
    [
        ({}, False),
        ({"use_opsm": True}, True),
        ({"advantage_estimator": "gspo"}, True),
        ({"mis_loss_method": "token_mis"}, False),
        ({"mis_loss_method": "sequence_mis"}, True),
        ({"mis_loss_method": "token_mis", "mis_loss_denominator": "kept"}, True),
        (loss_cases.GATES | {"mis_loss_method": "cispo", "mis_loss_denominator": "kept"}, False),
    ],
)
def test_ranks_exchange_sums_of_sequences_only_where_the_loss_needs_them(keys, sums) -> None:
    assert read_config(keys, whole_loss=True).whole_loss.settings.sums_sequences is sums


def test_a_method_needs_the_behavior_policy_only_if_it_compares_with_it() -> None:
    keys = {"mis_loss_method": "reinforce", "use_rollout_logprobs": True}
    assert read_config(keys, whole_loss=True).whole_loss.settings.needs_behavior is None


def test_a_sequence_is_masked_by_its_delta_only_where_its_advantage_is_below_0() -> None:
    masked = []
    for advantage in (1.0, 0.0, -1.0):
        found = mis_ext.policy_loss_from_log_probs(
            {"use_opsm": True, "opsm_delta": 0.1},
            current_logprobs=torch.full((1, 2), -3.0),
            proximal_logprobs=torch.full((1, 2), -2.0),
            advantages=torch.tensor([advantage]),
            response_mask=torch.ones(1, 2),
        )
        masked.append(float(found.metrics["opsm_clipfrac"].value()))
    assert masked == [0.0, 0.0, 1.0]


def test_a_lower_bound_of_the_ratio_of_0_and_below_is_none() -> None:
    assert [bounds_of(LossSettings(eps_clip=each))[0] for each in (0.25, 1.0, 5.0)] == [0.75, None, None]


# --- the page


PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "policy_loss.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("block", re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
def test_every_yaml_of_the_page_is_a_loss(block) -> None:
    import yaml

    keys = yaml.safe_load(block) | {"mis_guard": "warn", "mis_max_reject_fraction": 1.0}
    if "mis_loss_method" in keys:
        keys |= BEHAVIOR | {"eps_clip": 0.2, "eps_clip_high": None}
    skips = keys.get("mis_loss_mode") == "reinforce" or "mis_loss_proximal" in keys
    called(keys | (BEHAVIOR if skips else {}))
