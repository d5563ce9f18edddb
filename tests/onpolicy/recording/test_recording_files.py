# SPDX-License-Identifier: Apache-2.0
"""A recording on disk: the same after loading, or an error."""

import pytest
import torch
from tiny_decoder import TinyDecoder, packed, recording_of
from torch import nn

from mis_ext.onpolicy.recording.compare import compare
from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.recordings import Recording
from mis_ext.onpolicy.recording.rows import Rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_a_saved_recording_is_the_same_after_loading(tmp_path, dtype: torch.dtype) -> None:
    model = nn.Identity()
    values = torch.tensor([[[1.0, -0.0], [float("inf"), 3.0]]]).nan_to_num(posinf=7).to(dtype)
    with record(model) as recorder, recorder.rows(Rows.packed([2])):
        model((values, torch.zeros(4)))
    recording = recorder.recording()
    recording.save(tmp_path / "a.pt")
    loaded = Recording.load(tmp_path / "a.pt")
    assert loaded.skipped == recording.skipped != {}
    for kind in ("outputs", "inputs"):
        before, after = getattr(recording, kind), getattr(loaded, kind)
        assert [*before] == [*after]
        for module, entries in before.items():
            for label, entry in entries.items():
                other = after[module][label]
                assert entry.values.dtype == other.values.dtype == dtype
                assert entry.order == other.order
                assert all(torch.equal(x, y) for x, y in zip(entry[:3], other[:3], strict=True))
    assert compare(recording, loaded).passed


def test_a_file_that_is_no_recording_is_an_error(tmp_path) -> None:
    (tmp_path / "text.pt").write_text("not a tensor")
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    for name in ("text.pt", "weights.pt"):
        with pytest.raises(ValueError, match=rf"{name} is not a (recording|file of tensors)"):
            Recording.load(tmp_path / name)


@pytest.mark.parametrize("change", ["a key less", "a name less", "fewer places", "a number for places"])
def test_a_recording_that_is_damaged_is_an_error_with_its_name(change, tmp_path) -> None:
    path = tmp_path / "a.pt"
    recording_of(TinyDecoder(), packed(), modules=["head"]).save(path)
    content = torch.load(path)
    entry = content["outputs"]["head"][""]
    if change == "a key less":
        del content["skipped"]
    elif change == "a name less":
        del entry["order"]
    else:
        entry["position_N"] = entry["position_N"][:-1] if change == "fewer places" else 5
    torch.save(content, path)
    with pytest.raises(ValueError, match=r"a.pt is a damaged recording: \w"):
        Recording.load(path)
