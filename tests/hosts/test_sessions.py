# SPDX-License-Identifier: Apache-2.0
"""One session per `args` object, of whatever kind: what is read of it, how long it lives, what it keeps to itself."""

import argparse
import copy
import gc
import pickle
import types
import warnings
import weakref
from collections import UserDict
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import pytest
import torch
from hook_batches import make_batch

import mis_ext
from mis_ext import MismatchWarning
from mis_ext.correction.correct import plan_of
from mis_ext.hosts import session as runs
from mis_ext.hosts.session import all_arguments, read_argument, session_for

KEYS = {"use_tis": True, "tis_level": "sequence", "tis_upper_bound": 3.0, "use_rs": True, "rs_level": "geometric"}
KEYS |= {"rs_lower_bound": 0.99, "rs_upper_bound": 1.01, "qkv_format": "thd", "calculate_per_token_loss": True}


def with_class_attributes(keys: dict) -> Any:
    return type("Args", (), keys)()


def with_inherited_attributes(keys: dict) -> Any:
    return type("Args", (type("Defaults", (), keys),), {})()


def with_properties(keys: dict) -> Any:
    return type("Args", (), {name: property(lambda self, value=value: value) for name, value in keys.items()})()


def wrapped(keys: dict) -> Any:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["_inner"], name)

    return Wrapper(types.SimpleNamespace(**keys))


def wrapped_with_none(keys: dict) -> Any:
    class Wrapper:
        def __getattr__(self, name: str) -> Any:
            return keys.get(name)

    return Wrapper()


def with_slots(keys: dict) -> Any:
    return make_dataclass("Args", keys, slots=True)(**keys)


def frozen(keys: dict) -> Any:
    return make_dataclass("Args", keys, frozen=True)(**keys)


KINDS = {
    "Namespace": lambda keys: argparse.Namespace(**keys),
    "SimpleNamespace": lambda keys: types.SimpleNamespace(**keys),
    "class attributes": with_class_attributes,
    "inherited attributes": with_inherited_attributes,
    "properties": with_properties,
    "wrapper": wrapped,
    "wrapper that says None": wrapped_with_none,
    "dict": dict,
    "mapping proxy": lambda keys: types.MappingProxyType(dict(keys)),
    "dataclass with slots": with_slots,
    "frozen dataclass": frozen,
    "class": lambda keys: type("Args", (), keys),
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
def test_every_kind_of_args_gives_the_same_result(kind) -> None:
    expected = mis_ext.compute_mis_weights_with_cp(argparse.Namespace(**KEYS), **make_batch(noise=0.02))
    args = kind(KEYS)
    loss, masks, metrics = mis_ext.compute_mis_weights_with_cp(args, **make_batch(noise=0.02))
    assert torch.equal(loss, expected[0])
    assert torch.equal(torch.cat(masks), torch.cat(expected[1]))
    assert list(metrics) == list(expected[2])
    assert session_for(args).config == mis_ext.config_from_mapping(KEYS)
    assert session_for(args) is session_for(args)


@kinds
def test_a_correction_that_is_off_stays_off(kind) -> None:
    batch = make_batch()
    loss, masks, _ = mis_ext.compute_mis_weights_with_cp(kind({"use_tis": False}), **batch)
    assert loss is batch["pg_loss"]
    assert masks is batch["loss_masks"]


@pytest.mark.parametrize("kind", [kind for name, kind in KINDS.items() if not name.startswith("wrapper")])
def test_a_misspelt_key_is_noticed_wherever_it_stands(kind) -> None:
    with pytest.raises(ValueError, match=r"'tis_uper_bound' \(did you mean 'tis_upper_bound' or"):
        session_for(kind({"use_tis": True, "tis_uper_bound": 3.0}))


class Costly:
    """Properties that nobody may ask for."""

    use_tis = True

    @property
    def use_distributed_optimizer(self) -> bool:
        raise RuntimeError("not initialized yet")

    @property
    def world_size(self) -> int:
        raise RuntimeError("not initialized yet")

    @property
    def use_cuda_graph(self) -> bool:
        warnings.warn("deprecated", stacklevel=1)
        return True


def test_properties_of_others_are_not_called() -> None:
    assert session_for(Costly()).config == mis_ext.config_from_mapping({"use_tis": True})


def test_a_property_of_ours_that_raises_is_not_taken_for_absent() -> None:
    class Args:
        @property
        def tis_upper_bound(self) -> float:
            raise RuntimeError("not initialized yet")

    with pytest.raises(RuntimeError, match="not initialized yet"):
        session_for(Args())


def test_null_in_a_file_is_told_from_what_is_absent() -> None:
    assert "tis_level" not in all_arguments(argparse.Namespace(use_tis=True))
    assert all_arguments(argparse.Namespace(tis_level=None))["tis_level"] is None
    assert "tis_level" not in all_arguments({"use_tis": True})
    assert all_arguments({"tis_level": None})["tis_level"] is None
    assert read_argument({}, "tis_level") is None


def test_a_mapping_that_is_changed_in_place_has_a_new_session() -> None:
    keys = {"use_tis": True, "use_rs": True, "rs_level": "none", "rs_gates": [{"low": 0.5}]}
    before = session_for(keys)
    assert session_for(keys) is before
    keys["rs_gates"][0]["low"] = 0.6
    assert session_for(keys).config.gates[0].low == 0.6


def test_arguments_of_a_framework_are_read_once(monkeypatch) -> None:
    args = argparse.Namespace(use_tis=True)
    before = session_for(args)
    monkeypatch.setattr(runs, "read_config", None)
    args.loss_type = "value_loss"
    assert session_for(args) is before


def test_many_args_in_rotation_keep_their_sessions() -> None:
    everyone = [argparse.Namespace(use_tis=True, tis_upper_bound=2.0 + number) for number in range(100)]
    first = [session_for(args) for args in everyone]
    assert len(set(map(id, first))) == 100
    assert all(session_for(args) is session for args, session in zip(everyone, first, strict=True))


@kinds
def test_a_run_in_use_stays_and_what_nobody_uses_is_forgotten(kind) -> None:
    args = kind({"use_tis": True})
    session, unused = session_for(args), weakref.ref(session_for({"use_tis": True, "mis_guard": "warn"}))
    for number in range(100):
        session_for({"use_tis": True, "tis_upper_bound": 2.0 + number})
        assert session_for(args) is session
    gc.collect()
    assert unused() is None


@kinds
def test_a_run_ends_with_its_args(kind) -> None:
    args = kind({"use_tis": True, "loss_type": "custom_loss"})
    ended = weakref.ref(session_for(args))
    # Read again, as the loss does after prepare_rollout.
    runs.current_run(args, whole_loss=True)
    del args
    # The end of others is not noticed, such as of a SimpleNamespace.
    for number in range(64):
        session_for({"use_tis": True, "tis_upper_bound": 2.0 + number})
    # A class is in a cycle with itself, and so is a session.
    gc.collect()
    gc.collect()
    assert ended() is None


@dataclass(slots=True)
class Slotted:
    use_tis: bool = True
    extra: list = field(default_factory=list)


def test_args_with_slots_have_a_session_of_their_own() -> None:
    one, two = Slotted(), Slotted()
    assert session_for(one) is session_for(one)
    assert session_for(one) is not session_for(two)


def test_measuring_with_a_configuration_that_corrects_warns() -> None:
    with pytest.warns(MismatchWarning, match=r"--get-mismatch-metrics .* changes loss and masks"):
        session_for(argparse.Namespace(use_tis=True, get_mismatch_metrics=True))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("keys", [{"get_mismatch_metrics": True}, {"use_tis": False, "get_mismatch_metrics": True}])
def test_measuring_alone_warns_nothing(keys) -> None:
    batch = make_batch()
    # Nothing is rejected: no share of it is too large.
    batch["rollout_log_probs"][0][:] = torch.nan
    mis_ext.compute_mis_weights_with_cp(argparse.Namespace(**keys), **batch)


def test_miles_backend_that_divides_by_survivors_takes_no_kept_denominator() -> None:
    keys = {"use_tis": True, "train_backend": "fsdp"}
    for _ in range(2):
        with pytest.raises(ValueError, match="mis_denominator: kept with train_backend: fsdp corrects twice"):
            session_for(argparse.Namespace(**keys, mis_denominator="kept"))
    session_for(argparse.Namespace(**keys))
    session_for(argparse.Namespace(use_tis=True, train_backend="megatron", mis_denominator="kept"))


def test_mappings_with_the_same_content_are_one_run() -> None:
    first = session_for({"use_tis": True, "rs_veto_threshold": 1e-3})
    assert session_for({"use_tis": True, "rs_veto_threshold": 1e-3}) is first
    assert session_for({"use_tis": True, "rs_veto_threshold": 1e-4}) is not first
    # Also if each of them is deleted before the next call.
    again = session_for(UserDict(use_tis=True, tis_mode="mask"))
    assert session_for(UserDict(use_tis=True, tis_mode="mask")) is again
    # What is not read may change in each call.
    timed = session_for({"use_tis": True, "seconds": 1.0})
    assert session_for({"use_tis": True, "seconds": 2.0}) is timed


def test_reading_the_whole_loss_later_keeps_the_session() -> None:
    """slime calls prepare_rollout before the loss."""
    args = argparse.Namespace(loss_type="custom_loss")
    session = session_for(args)
    assert not session.config.metrics_only
    assert runs.current_run(args, whole_loss=True).session is session
    # The loss corrects nothing without use_tis.
    assert session.config.metrics_only


def test_what_the_hook_and_the_whole_loss_read_is_said_once() -> None:
    keys = {"use_tis": True, "use_rollout_logprobs": True, "get_mismatch_metrics": True, "tis_lower_bound": 0.5}
    args = argparse.Namespace(**keys, mis_guard="warn")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", MismatchWarning)
        # Of a file, which is read again for the loss: Python shows the same text once.
        warnings.filterwarnings("default", "tis_lower_bound")
        runs.current_run(args)
        runs.current_run(args, whole_loss=True)
    assert len(said) == 3
    # prepare_rollout reads the keys of a loss that corrects nothing.
    runs.current_run(argparse.Namespace(use_rollout_logprobs=True, loss_type="custom_loss"))


def test_the_keys_of_the_whole_loss_are_checked_where_it_runs() -> None:
    args = argparse.Namespace(use_tis=True, mis_loss_mode="bypas")
    assert runs.current_run(args).config.whole_loss is None
    with pytest.raises(ValueError, match="mis_loss_mode must be one of"):
        runs.current_run(args, whole_loss=True)


def test_a_host_that_divides_by_what_is_left_runs_no_whole_loss_that_rejects() -> None:
    """Miles' FSDP backend: -0.2362 for -0.2966 on one batch, before this was refused."""
    keys = {"use_tis": True, "use_rs": True, "rs_lower_bound": 0.8, "rs_upper_bound": 1.25}
    args = argparse.Namespace(**keys, train_backend="fsdp")
    runs.current_run(args)
    with pytest.raises(ValueError, match=r"train_backend: fsdp divides by kept tokens: put the filter"):
        runs.current_run(args, whole_loss=True)
    runs.current_run(argparse.Namespace(**keys, train_backend="megatron"), whole_loss=True)
    runs.current_run(argparse.Namespace(use_tis=True, train_backend="fsdp"), whole_loss=True)


def test_a_session_and_what_it_gives_can_be_copied_and_a_new_configuration_is_used() -> None:
    session = mis_ext.Session(
        mis_ext.preset("miles_compat").replace(metrics=("mis_k3_kl", "mis_tis_weight_ess", "mis_ratio_max"))
    )
    trainer, engine = torch.tensor([[-0.5, -1.0]]), torch.tensor([[-0.5, -4.0]])
    streams = {"proximal_logprobs": trainer, "behavior_logprobs": engine, "response_mask": torch.ones(1, 2)}
    expected = mis_ext.correct_padded(session, **streams)
    for same in (copy.deepcopy(session), pickle.loads(pickle.dumps(session))):
        assert same.config == session.config
        assert torch.equal(mis_ext.correct_padded(same, **streams).weights, expected.weights)
    session.config = mis_ext.preset("mis").replace(weight=mis_ext.Weight(high=1.5))
    assert mis_ext.correct_padded(session, **streams).weights.max() == 1.5


def test_a_session_knows_its_collectives_before_its_first_call() -> None:
    plan_of.cache_clear()
    session_for(argparse.Namespace(**KEYS))
    assert plan_of.cache_info().currsize == 1
