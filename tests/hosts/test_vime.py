# SPDX-License-Identifier: Apache-2.0
"""vime, as its code was read: the calls of its loss, the startup check, and the record that a user can make.

Its full loss and its scoring passes are among the hosts of `test_model_provider.py` and `test_policy_loss_scoring.py`.
"""

import argparse
import sys
import types

import loss_cases
import pytest
import torch
from host_stand_ins import called, running

import mis_ext
from examples.record_loss_call import check, main, record
from mis_ext.frameworks import MILES, SLIME, VIME, find_framework

KEYS = {"use_tis": True, "use_rollout_logprobs": False, "calculate_per_token_loss": False, "rollout_top_p": 1.0}


def loss_call(args: argparse.Namespace, function, *, rollout_log_probs=None) -> tuple:
    """One call as vime's policy loss makes it: these keywords, and no others."""
    generator, lengths = torch.Generator().manual_seed(3), [40, 25, 35]

    def drawn() -> list[torch.Tensor]:
        return [-2.0 + 0.1 * torch.randn(length, generator=generator) for length in lengths]

    trained, sampled = drawn(), drawn()
    return function(
        args=args,
        pg_loss=torch.randn(sum(lengths), generator=generator).requires_grad_(),
        train_log_probs=trained,
        rollout_log_probs=sampled if rollout_log_probs is None else rollout_log_probs(sampled),
        loss_masks=[torch.ones(length, dtype=torch.int32) for length in lengths],
        total_lengths=[length + 7 for length in lengths],
        response_lengths=lengths,
    )


def test_what_is_imported_says_which_framework_runs(monkeypatch) -> None:
    assert find_framework() is None
    for framework in (MILES, SLIME, VIME):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, framework.loss, types.ModuleType(framework.loss))
            assert find_framework() is framework
        # A class of the user's, over the framework's.
        sample = type("Sample", (type("Sample", (), {"__module__": f"{framework.name}.utils.types"}),), {})()
        assert find_framework(sample) is framework
    assert find_framework(object()) is None


@pytest.mark.parametrize("shape", ["thd", None], ids=["2b83ea20", "with no qkv_format"])
def test_the_hook_answers_a_call_of_vime(shape) -> None:
    args = argparse.Namespace(**KEYS, tis_mode="truncate", tis_upper_bound=1.05)
    if shape is not None:
        args.qkv_format = shape
    with running("vime"):
        loss, masks, metrics = loss_call(args, mis_ext.compute_mis_weights_with_cp)
    assert loss.shape == (100,)
    assert loss.requires_grad
    assert [len(mask) for mask in masks] == [40, 25, 35]
    assert {values.shape for values in metrics.values()} == {(100,)}
    assert 0.0 < float(metrics["mis_k3_kl"].mean()) < 0.1


@pytest.mark.parametrize(
    "keys",
    [
        {"use_tis": True, "custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp"},
        {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss", "advantage_estimator": "gspo"},
    ],
    ids=["hook", "full loss"],
)
def test_the_startup_check_passes_with_its_one_line(keys, tmp_path, capsys) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("vllm_gpu_memory_utilization: 0.5\n")
    with running("vime"):
        mis_ext.check_setup(argparse.Namespace(**keys, custom_config_path=str(path), vllm_gpu_memory_utilization=0.5))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_score_centering_is_refused_beside_the_full_loss() -> None:
    with running("vime"), pytest.raises(ValueError, match="--use-score-centering"):
        called({"use_score_centering": True}, loss_cases.local_batch(loss_cases.whole_batch()))


def test_kept_tokens_may_lie_in_a_file() -> None:
    options = loss_cases.NOT_RECORDED["top-p, gates, hot"]
    batch = loss_cases.local_batch(loss_cases.with_top_p(loss_cases.whole_batch()))
    in_files = dict(batch)
    for name in ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
        in_files[name] = [types.SimpleNamespace(load=lambda each=each: torch.as_tensor(each)) for each in batch[name]]
    with running("vime"):
        wanted, found = called(options, dict(batch)), called(options, in_files)
    assert torch.equal(found[0], wanted[0])


def test_a_recorded_call_is_replayed(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("MIS_EXT_RECORD", str(tmp_path))
    args = argparse.Namespace(**KEYS)
    with running("vime"):
        loss, masks, metrics = loss_call(args, record)
        loss_call(args, record, rollout_log_probs=lambda sampled: [torch.zeros_like(each) for each in sampled])
    assert loss.shape == (100,)
    assert [mask.dtype for mask in masks] == [torch.int32] * 3
    assert metrics == {}
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["record_loss_call.py", str(tmp_path)])
    main()
    first, second = capsys.readouterr().out.split(".pt\n")[1:]
    assert "called by vime with pg_loss, train_log_probs" in first
    assert "read: {'mis_k3_kl': 0.0" in first
    assert "refused: " in second
    assert "placeholders" in second
    part = torch.load(next(tmp_path.glob("*_0.pt")), weights_only=True)
    part["given"]["rollout_log_probs"][0] = part["given"]["rollout_log_probs"][0][:3]
    assert "context parallelism" in check(part)[-1]
