# SPDX-License-Identifier: Apache-2.0
"""Files of torch.save: what was saved, without running anything."""

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch

from mis_ext.tools.dumps.formats import load_plain, read_torch

DTYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")


def content() -> dict[str, Any]:
    numbers = torch.arange(24, dtype=torch.float32)
    return {
        "of_dtype": [torch.tensor([0, 1, 1], dtype=getattr(torch, name)) for name in DTYPES],
        "views": [numbers[3:9], numbers.view(4, 6).T, numbers[5], numbers[::2], numbers[2:2]],
        "empty": torch.empty(0),
        "a gradient": torch.ones(2, requires_grad=True),
        "plain": ["ä", -(2**70), 2**31, 0.1, True, None, (), ("a", ["b"]), range(2, 9, 3)],
        "ordered": OrderedDict(a=1),
    }


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(each)


def test_a_file_is_what_was_saved(tmp_path) -> None:
    saved = content()
    torch.save(saved, tmp_path / "7.pt")
    found = load_plain(tmp_path / "7.pt")
    assert {key: found[key] for key in ("plain", "ordered")} == {key: saved[key] for key in ("plain", "ordered")}
    assert [type(each) for each in found["plain"]] == [type(each) for each in saved["plain"]]
    pairs = [*zip(tensors_of(saved), tensors_of(found), strict=True)]
    assert len(pairs) == len(DTYPES) + 7
    for expected, tensor in pairs:
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(tensor, expected)


def test_a_sign_that_is_not_in_the_numbers_is_not_lost(tmp_path) -> None:
    torch.save(torch.tensor([1.0 + 2.0j]).conj().imag, tmp_path / "7.pt")
    assert load_plain(tmp_path / "7.pt").tolist() == [-2.0]


def test_tensors_of_one_memory_still_are(tmp_path) -> None:
    numbers = torch.rand(5)
    torch.save([numbers, numbers[:3], numbers.clone()], tmp_path / "7.pt")
    whole, begin, copied = load_plain(tmp_path / "7.pt")
    assert whole.data_ptr() == begin.data_ptr() != copied.data_ptr()
    begin.zero_()
    assert whole.tolist() == [0.0, 0.0, 0.0, *numbers[3:].tolist()]


def test_a_file_may_be_cut_while_its_numbers_are_used(tmp_path) -> None:
    numbers = torch.rand(100_000)
    torch.save([numbers], tmp_path / "7.pt")
    (found,) = load_plain(tmp_path / "7.pt")
    os.truncate(tmp_path / "7.pt", 0)
    assert torch.equal(found, numbers)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux does")
def test_no_file_stays_open(tmp_path) -> None:
    torch.save(content(), tmp_path / "7.pt")
    before = len(os.listdir("/proc/self/fd"))
    found = load_plain(tmp_path / "7.pt")
    assert len(os.listdir("/proc/self/fd")) == before
    del found


class Runs:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_in_a_file_runs(tmp_path) -> None:
    torch.save([torch.ones(2), Runs(tmp_path / "made")], tmp_path / "7.pt")
    with pytest.raises(KeyError, match="mkdir"):
        load_plain(tmp_path / "7.pt")
    with pytest.raises(ValueError, match="--trust-pickle"):
        read_torch(tmp_path / "7.pt", trust_pickle=False)
    assert not (tmp_path / "made").exists()


class Scripted(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_program_in_a_file_is_not_even_loaded(tmp_path, monkeypatch) -> None:
    torch.jit.script(Scripted()).save(tmp_path / "7.pt")
    monkeypatch.setattr(torch.jit, "load", None)
    with pytest.raises(pickle.UnpicklingError, match="a program"):
        load_plain(tmp_path / "7.pt")
    with pytest.raises(ValueError, match="TorchScript"):
        read_torch(tmp_path / "7.pt", trust_pickle=False)


def rewritten(path: Path, compression: int, *replaced: bytes) -> Path:
    """The archive anew, with bytes of its index replaced."""
    with ZipFile(path) as old, ZipFile(path.with_name("other.pt"), "w", compression) as new:
        for name in old.namelist():
            record = old.read(name)
            new.writestr(name, record.replace(*replaced) if replaced and name.endswith("data.pkl") else record)
    return path.with_name("other.pt")


def test_numbers_beyond_the_end_of_a_file_are_refused(tmp_path) -> None:
    torch.save([torch.ones(3)], tmp_path / "7.pt")
    # 3 numbers become 65,535.
    with pytest.raises(RuntimeError, match="does not match expected size"):
        load_plain(rewritten(tmp_path / "7.pt", ZIP_STORED, b"K\x03", b"M\xff\xff"))


def test_compressed_numbers_are_read(tmp_path) -> None:
    saved = {"log_probs": [torch.arange(400.0), torch.arange(4.0)]}
    torch.save(saved, tmp_path / "7.pt")
    found = load_plain(rewritten(tmp_path / "7.pt", ZIP_DEFLATED))["log_probs"]
    assert all(torch.equal(*pair) for pair in zip(found, saved["log_probs"], strict=True))


def test_a_file_without_an_archive_is_read_by_torch(tmp_path) -> None:
    torch.save({"log_probs": [torch.ones(3)]}, tmp_path / "7.pt", _use_new_zipfile_serialization=False)
    assert read_torch(tmp_path / "7.pt", trust_pickle=False).columns["log_probs"][0].tolist() == [1.0] * 3
