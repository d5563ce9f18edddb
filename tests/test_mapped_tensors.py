"""Files of torch.save that are mapped: what torch.load gives, without running or copying anything."""

import os
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import pytest
import torch

from mis_ext.dumps.mapped_tensors import load_mapped
from mis_ext.dumps.torch_files import read_torch

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
    found = load_mapped(tmp_path / "7.pt")
    assert {key: found[key] for key in ("plain", "ordered")} == {key: saved[key] for key in ("plain", "ordered")}
    assert [type(each) for each in found["plain"]] == [type(each) for each in saved["plain"]]
    pairs = [*zip(tensors_of(saved), tensors_of(found), strict=True)]
    assert len(pairs) == len(DTYPES) + 7
    for expected, tensor in pairs:
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (expected.dtype, expected.shape, expected.stride())
        assert torch.equal(tensor, expected)


def test_a_sign_that_is_not_in_the_numbers_is_not_lost(tmp_path) -> None:
    negated = torch.tensor([1.0 + 2.0j]).conj().imag
    torch.save(negated, tmp_path / "7.pt")
    with pytest.raises(pickle.UnpicklingError, match="a sign that is not in its numbers"):
        load_mapped(tmp_path / "7.pt")


def test_tensors_of_one_memory_still_are(tmp_path) -> None:
    numbers = torch.rand(5)
    torch.save([numbers, numbers[:3], numbers.clone()], tmp_path / "7.pt")
    whole, begin, copied = load_mapped(tmp_path / "7.pt")
    assert whole.data_ptr() == begin.data_ptr() != copied.data_ptr()
    begin.zero_()
    assert whole.tolist() == [0.0, 0.0, 0.0, *numbers[3:].tolist()]
    assert torch.equal(load_mapped(tmp_path / "7.pt")[0], numbers), "the file was written to"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux does")
def test_no_file_stays_open(tmp_path) -> None:
    torch.save(content(), tmp_path / "7.pt")
    before = len(os.listdir("/proc/self/fd"))
    found = load_mapped(tmp_path / "7.pt")
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
        load_mapped(tmp_path / "7.pt")
    with pytest.raises(ValueError, match="--trust-pickle"):
        read_torch(tmp_path / "7.pt", trust_pickle=False)
    assert not (tmp_path / "made").exists()


def rewritten(path: Path, *, compression: int = ZIP_STORED, **others: bytes) -> Path:
    """The archive with other records, by the ends of their names, or compressed."""
    with ZipFile(path) as old, ZipFile(path.with_name("other.pt"), "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, others.get(name.rpartition("/")[2], old.read(name)))
    return path.with_name("other.pt")


@pytest.mark.parametrize(
    ("dtype", "change", "reason"),
    [
        (torch.uint8, {"compression": ZIP_DEFLATED}, "can be mapped"),
        (torch.uint8, {"0": b"12"}, "can be mapped"),
        (torch.uint8, {"0": b"1234"}, "can be mapped"),
        (torch.float64, {}, "can be mapped"),
        (torch.uint8, {"byteorder": b"big"}, "byte order"),
    ],
    ids=["compressed", "too short", "too long", "between two numbers", "big-endian"],
)
def test_what_cannot_be_mapped_is_refused(tmp_path, dtype, change, reason) -> None:
    torch.save([torch.ones(3, dtype=dtype)], tmp_path / "7.pt")
    with pytest.raises(ValueError, match=reason):
        load_mapped(rewritten(tmp_path / "7.pt", **change))


def test_a_rewritten_archive_is_read_where_it_can_be(tmp_path) -> None:
    torch.save([torch.ones(3, dtype=torch.uint8)], tmp_path / "7.pt")
    (numbers,) = load_mapped(rewritten(tmp_path / "7.pt", **{"0": b"123"}))
    assert numbers.tolist() == [*b"123"]


def test_what_cannot_be_mapped_is_read_by_torch(tmp_path) -> None:
    torch.save({"log_probs": [torch.ones(3)]}, tmp_path / "7.pt", _use_new_zipfile_serialization=False)
    assert read_torch(tmp_path / "7.pt", trust_pickle=False).columns["log_probs"][0].tolist() == [1.0] * 3
