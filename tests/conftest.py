"""Before any test module is imported: without a GPU, Triton's kernels run in its interpreter."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(items):
    """Files with long tests first, so that at the end no process is left alone with one of them."""
    long = {item.path for item in items if item.get_closest_marker("slow") or item.get_closest_marker("distributed")}
    items.sort(key=lambda item: item.path not in long)
