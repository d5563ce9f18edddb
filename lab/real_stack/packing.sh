# SPDX-License-Identifier: Apache-2.0
# What pack_*.sh have in common. To be sourced; works in a new folder, which is removed at the end.

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
out="$(realpath -m -- "$1")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"

# unpack_wheels FOLDER PACKAGE==VERSION ...: for Python 3.12 on x86-64, glibc 2.28, and the newer ones that the array glibc
# names; without what they need.
unpack_wheels() {
    local folder="$1" platforms=() version wheel
    shift
    for version in ${glibc[@]+"${glibc[@]}"} 2_28 2_27 2_24 2_17; do platforms+=(--platform "manylinux_${version}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
    python3 -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp "${platforms[@]}" -d wheels "$@"
    mkdir -p "$folder"
    for wheel in wheels/*.whl; do unzip -q -o "$wheel" -d "$folder"; done
}

# write_archive: all/ into $out.
write_archive() {
    find all -name __pycache__ -prune -exec rm -rf {} +
    tar -C all -c . | xz -6 -T0 > "$out"
    ls -l "$out"
}
