# SPDX-License-Identifier: Apache-2.0
"""A run's data as the example dumps them, after ``mis_ext.prepare_rollout``: the command has one such hook."""

import dump_rollout

import mis_ext


def save(args: object, rollout_id: int, rollout_data: dict) -> None:
    """Prepare, then write."""
    mis_ext.prepare_rollout(args, rollout_id, rollout_data)
    dump_rollout.save(args, rollout_id, rollout_data)
