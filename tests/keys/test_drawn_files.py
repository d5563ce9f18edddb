# SPDX-License-Identifier: Apache-2.0
"""Drawn files: the startup check and the first call refuse the same ones, and name the key.

lab/peers/drawn_files compares more of them, with slime's own step and another revision.
"""

import re
import warnings
from argparse import Namespace

import loss_cases
import pytest
import yaml
from drawn_files import CLASSES, DrawnFile, draw

import mis_ext

FILES = draw(seed=1, count=20 * len(CLASSES))
LAUNCHES = {
    "hook": {"loss_type": "policy_loss"},
    "loss": {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss"},
}


def arguments(file: DrawnFile) -> Namespace:
    flags = {"use_tis": True, "eps_clip": 0.2, "eps_clip_high": 0.2, "num_steps_per_rollout": 1}
    groups = {"rollout_data_postprocess_path": None, "custom_reward_post_process_path": None}
    return loss_cases.host_args(**flags | groups | LAUNCHES[file.launch] | yaml.safe_load(file.text))


def first_call(args: Namespace) -> None:
    batch = loss_cases.with_options(loss_cases.local_batch(loss_cases.whole_batch()), args)
    logits = batch.pop("logits")
    if args.loss_type == "custom_loss":
        mis_ext.policy_loss(args, batch, logits, lambda values: values.sum())
    elif args.use_tis or args.get_mismatch_metrics:
        parts = ("rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
        pg_loss = loss_cases.torch.zeros(sum(batch["response_lengths"]))
        given = {name: batch[name] for name in parts}
        mis_ext.compute_mis_weights_with_cp(args, pg_loss=pg_loss, train_log_probs=batch["log_probs"], **given)


def error_of(call, file: DrawnFile) -> str | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call(arguments(file))
        except (ValueError, TypeError) as error:
            return str(error)
    return None


@pytest.mark.parametrize("kind", CLASSES)
def test_the_startup_check_refuses_what_the_first_call_refuses_and_names_the_key(kind, capsys) -> None:
    refused = 0
    for file in (file for file in FILES if file.kind == kind):
        at_start, at_call = error_of(mis_ext.check_setup, file), error_of(first_call, file)
        is_called = not (at_start or "").startswith("mis_ext would not be called")
        assert not is_called or (at_start is None) == (at_call is None), (file.text, at_start, at_call)
        refused += at_start is not None
        if at_start is not None and is_called:
            assert max(map(len, at_start.splitlines())) <= 240, at_start
            assert any(re.search(rf"(?<!\w){re.escape(key)}(?!\w)", at_start) for key in file.keys), at_start
            if kind in ("out of range", "wrong type"):
                assert file.wrong in at_start, (file.text, at_start)
    if kind in ("misspelt", "out of range", "wrong type"):
        assert refused >= 18
    assert kind != "legal" or refused <= 4
