"""Files of ``torch.save`` that hold nothing but plain data and tensors: mapped into memory, not copied.

``torch.load(weights_only=True)`` unpickles in Python and takes 0.1 ms a tensor, which is most of the time of reading a
dump of many responses. Here Python's own unpickler, in C, does it with the few names that plain tensors need.
"""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import torch
from torch import Tensor

_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_INDEX = "/data.pkl"
_HEADER_SIZE, _HEADER_LENGTHS = 30, struct.Struct("<26xHH")
"""Of a record in a zip file: what stands before its name, and in it the lengths of the name and of the padding."""


def load_mapped(path: Path) -> Any:
    """What a file of ``torch.save`` holds; tensors lie in the file, pages of which are read when they are looked at.

    Names in the file are looked up in a fixed table, so that nothing in it can run.

    As with every mapped file, nobody may cut it short while its tensors are in use: the process would be killed.

    Raises:
        Exception: Of any kind: the file is none, is not whole, or holds something else. ``torch.load`` may read it.
    """
    with ZipFile(path) as archive:
        records = {record.filename: record for record in archive.infolist()}
        (root,) = (name.removesuffix(_INDEX) for name in records if name.endswith(_INDEX))
        if archive.read(f"{root}/byteorder").decode() != sys.byteorder:
            raise ValueError("numbers of another byte order")
        index = archive.read(root + _INDEX)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        size = len(content)
        # Unlike the one above, this map needs no open file: many files may wait for their other parts.
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        whole = {dtype: mapped[: size - size % dtype.itemsize].view(dtype) for dtype in _DTYPES.values()}

        def find(key: str, dtype: torch.dtype, count: int) -> _Storage:
            record = records[f"{root}/data/{key}"]
            return _Storage(whole[dtype], _first(content, record, dtype.itemsize, count))

        return _Unpickler(io.BytesIO(index), find).load()


class _Storage(NamedTuple):
    """Where in the file the numbers of a storage begin, counted in numbers of its dtype."""

    whole: Tensor
    first: int


def _first(content: mmap.mmap, record: ZipInfo, item_size: int, count: int) -> int:
    name_length, padding = _HEADER_LENGTHS.unpack_from(content, record.header_offset)
    begin: int = record.header_offset + _HEADER_SIZE + name_length + padding
    first, rest = divmod(begin, item_size)
    if rest or record.compress_type != ZIP_STORED or record.file_size != count * item_size:
        raise ValueError(f"{record.filename} is not {count} numbers of {item_size} bytes that can be mapped")
    return first


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, find: Callable[[str, torch.dtype, int], _Storage]) -> None:
        super().__init__(file)
        self._find = find

    def find_class(self, module: str, name: str) -> Any:
        return _DTYPES[name] if module == "torch" else _OTHERS[f"{module}.{name}"]

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _device, count = pid
        if kind != "storage":
            raise pickle.UnpicklingError(f"a {kind}, not a storage")
        return self._find(key, dtype, count)


def _rebuild(
    storage: _Storage,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    _requires_grad: bool,
    _hooks: Any,
    metadata: Any = None,
) -> Tensor:
    """As ``torch._utils._rebuild_tensor_v2``; whether it needs a gradient does not matter here."""
    if metadata:
        raise pickle.UnpicklingError(f"a tensor with {metadata}, such as a sign that is not in its numbers")
    # Bounds are checked against the whole file.
    return storage.whole.as_strided(size, stride, storage.first + offset)


_OTHERS = {
    "torch._utils._rebuild_tensor_v2": _rebuild,
    "collections.OrderedDict": OrderedDict,
    "__builtin__.xrange": range,
}
