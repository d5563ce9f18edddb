# SPDX-License-Identifier: Apache-2.0
"""Keep the machine code of one GPU architecture in a shared library, and zero the code of all others.

    python3 keep_architecture.py LIBRARY 90

A fat binary is a container: a header, then one entry for each architecture. Every container stays at its address, with
fewer entries. What is left over becomes zeros, which compress to nothing. A container without code for the architecture
stays as it is.
"""

from __future__ import annotations

import argparse
import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

# Of a container: magic, version, size of this header, size of the entries.
_CONTAINER = struct.Struct("<IHHQ")
_MAGIC = 0xBA55ED50
# Of an entry: kind, version, size of this header, size of the code. The architecture stands at 28.
_ENTRY = struct.Struct("<HHIQ")
_ARCHITECTURE = 28
_MACHINE_CODE = 2


def main() -> None:
    """Change the library in place and print what was kept."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("architecture", type=int, help="90 for sm_90 and sm_90a")
    options = parser.parse_args()
    with options.library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        start, size = _section(data, b".nv_fatbin")
        containers = list(_containers(data, start, start + size))
        kept = sum(_prune(data, container, options.architecture) for container in containers)
    print(f"{options.library.name}: {kept / 2**20:.1f} of {size / 2**20:.1f} MiB, {len(containers)} containers")


def _section(data: mmap.mmap, name: bytes) -> tuple[int, int]:
    """Offset and size of a section of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    width, count, index_of_names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * width) for i in range(count)]
    names = headers[index_of_names][4]
    for header in headers:
        first = names + header[0]
        if data[first : data.find(b"\0", first)] == name:
            return header[4], header[5]
    sys.exit(f"no section {name.decode()} in this library")


def _containers(data: mmap.mmap, start: int, end: int) -> Iterator[int]:
    position = start
    while position < end:
        magic, _, header, size = _CONTAINER.unpack_from(data, position)
        if magic == _MAGIC:
            yield position
            position += header + size
        else:
            position += 8


def _prune(data: mmap.mmap, container: int, architecture: int) -> int:
    """Keep the entries of the architecture, moved to the front, and return their size."""
    magic, version, header, size = _CONTAINER.unpack_from(data, container)
    position, end, kept = container + header, container + header + size, b""
    while position < end:
        kind, _, entry_header, entry_size = _ENTRY.unpack_from(data, position)
        after = position + entry_header + entry_size
        (found,) = struct.unpack_from("<I", data, position + _ARCHITECTURE)
        if (kind, found) == (_MACHINE_CODE, architecture):
            kept += data[position:after]
        position = after
    if not kept:
        return size
    data[container + header : end] = kept + bytes(size - len(kept))
    _CONTAINER.pack_into(data, container, magic, version, header, len(kept))
    return len(kept)


if __name__ == "__main__":
    main()
