# SPDX-License-Identifier: Apache-2.0
"""Both backends of the scoring, one at a time."""

import pytest


@pytest.fixture(params=["eager", "triton"])
def backend(request, monkeypatch) -> str:
    if request.param == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("MIS_EXT_BACKEND", request.param)
    return request.param
