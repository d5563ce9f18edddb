"""Whether a forward pass is a recomputation."""

from __future__ import annotations

import torch


def is_in_backward() -> bool:
    """Whether autograd's engine is running: then a forward pass is the recomputation of a checkpointed layer."""
    return torch._C._current_graph_task_id() != -1
