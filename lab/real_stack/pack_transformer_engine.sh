#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Transformer Engine for one Hopper GPU without a network, compiled here without a GPU: one archive of 13 MB, in pieces.
#
#   pack_transformer_engine.sh PYTHON OUTPUT_DIR
#
# PYTHON is a Python 3.12 with its headers; OUTPUT_DIR gets pieces/te.tar.xz.*, unpack.sh and build.log. Takes 15 to 20 minutes on
# two cores and 9 GB of disk. Needs g++, strip, xz and CUDA 13.0's headers (CUDA_HOME).
#
# There: bash unpack.sh PIECES SITE, then source SITE/env.sh. Expected there: Python 3.12, torch 2.11.0+cu130, glibc 2.34 or
# newer, einops, onnxscript.
set -euo pipefail
python="$1"
out="$(realpath -m "$2")"
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
# 2.13 and newer want functions of cuBLAS that are newer than CUDA 13.0, which torch 2.11 brings.
version=2.12.0
torch=2.11.0
# Only Hopper's machine code: 53 of 440 MiB.
architecture=90
piece_bytes=$((58 * 1024 * 1024))

work="$out/work"
mkdir -p "$out/pieces" "$work/wheels"
"$python" -c 'import sys; assert sys.version_info[:2] == (3, 12), f"Python 3.12 is needed, got {sys.version}"'

# 1. The compiler's environment: torch with its CUDA libraries, because they bring the headers of cuBLAS, cuDNN and NCCL.
[ -x "$work/venv/bin/python" ] || "$python" -m venv "$work/venv"
pip="$work/venv/bin/pip"
"$pip" install -q "torch==$torch" wheel ninja pybind11 packaging numpy
nvidia="$("$work/venv/bin/python" -c 'import nvidia; print(list(nvidia.__path__)[0])')"

# 2. What has wheels: the kernels, the Python part, and what the other machine lacks.
"$pip" download -q --no-deps -d "$work/wheels" "transformer_engine_cu13==$version" "transformer_engine==$version" \
    megatron-core==0.16.1 gguf==0.17.1 pydantic==2.12.5 pydantic-core==2.41.5 annotated-types==0.7.0 \
    typing-extensions==4.16.0 typing-inspection==0.4.2

# 3. What has none: the bindings to torch. They are C++ alone, so no GPU code is compiled.
if ! ls "$work"/wheels/transformer_engine_torch-*.whl > /dev/null 2>&1; then
    CUDA_HOME="${CUDA_HOME:-/usr/local/cuda}" NVTE_PYTORCH_FORCE_BUILD=TRUE MAX_JOBS="${MAX_JOBS:-2}" \
        CPATH="$nvidia/cu13/include:$nvidia/cudnn/include:$nvidia/nccl/include" \
        nice -n 10 "$pip" wheel -v --no-deps --no-build-isolation -w "$work/wheels" "transformer_engine_torch==$version" \
        > "$out/build.log" 2>&1 || { tail -30 "$out/build.log"; exit 1; }
fi

# 4. One folder, without what is not used.
rm -rf "$work/site"
mkdir "$work/site"
for wheel in "$work"/wheels/*.whl; do "$python" -m zipfile -e "$wheel" "$work/site"; done
# With JAX installed, Transformer Engine would look for its JAX part and warn.
rm -rf "$work/site/transformer_engine/jax"
"$python" "$here/keep_architecture.py" "$work/site/transformer_engine/wheel_lib/libtransformer_engine.so" "$architecture"
find "$work/site" -name '*.so' -exec strip --strip-unneeded {} +

# 5. The archive, in pieces.
rm -f "$out"/pieces/te.tar.xz.*
tar -C "$work" -c site | nice -n 10 xz -6 | split -b "$piece_bytes" - "$out/pieces/te.tar.xz."
cat "$out"/pieces/te.tar.xz.* | sha256sum | cut -d' ' -f1 > "$out/pieces/te.sha256"
cp "$here/unpack_transformer_engine.sh" "$out/unpack.sh"
ls -l "$out/pieces"
