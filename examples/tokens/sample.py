# SPDX-License-Identifier: Apache-2.0
"""Input of ``mis_ext.rollout.generate``: a sample with the fields of slime and Miles, and their arguments."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Status(Enum):
    """Status of a sample."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"


_STATUS_OF = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(kw_only=True)
class Sample:
    """The fields that ``generate`` reads and writes. The class of slime and Miles has more."""

    Status = Status

    prompt: str | list[dict[str, Any]]
    index: int = 0
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: Any = None
    weight_versions: list[str] = field(default_factory=list)
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    session_id: str | None = None
    multimodal_inputs: dict[str, Any] | None = None
    non_generation_time: float = 0.0

    def update_from_meta_info(self, args: Namespace, meta_info: dict[str, Any]) -> None:
        """Take weight version and status from a response, as slime and Miles do."""
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])
        self.status = _STATUS_OF[meta_info["finish_reason"]["type"]]


def host_args(port: int, checkpoint: Path, **others: Any) -> Namespace:
    """The arguments that ``generate`` reads: the router's address, the tokenizer's directory and ``others``."""
    address = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": port}
    return Namespace(**address, hf_checkpoint=str(checkpoint), **others)
