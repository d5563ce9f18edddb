#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Join and unpack what pack_transformer_engine.sh made.
#
#   unpack.sh PIECES_DIR SITE_DIR && source SITE_DIR/env.sh
set -euo pipefail
pieces="$1"
site="$2"
[ "$(cat "$pieces"/te.tar.xz.* | sha256sum | cut -d' ' -f1)" = "$(cat "$pieces/te.sha256")" ] || {
    echo "the pieces in $pieces are not those of te.sha256: $(ls "$pieces")" >&2
    exit 1
}
mkdir -p "$site"
cat "$pieces"/te.tar.xz.* | tar -xJ -C "$site" --strip-components=1
# Libraries that Transformer Engine names without a path: torch's own copies, so that there is one of each.
nvidia="$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])')"
# Some kernels are compiled when first used, from the toolkit's headers. Without those, slower ones that are compiled are taken.
kernels="export NVTE_DISABLE_NVRTC=1"
for cuda in "${CUDA_HOME:-/usr/local/cuda}" /usr/local/cuda-13.0 "$nvidia/cu13"; do
    if [ -e "$cuda/include/cuda_runtime.h" ] && [ -d "$cuda/include/crt" ]; then
        kernels="export NVTE_CUDA_INCLUDE_DIR=\"$cuda/include\""
        break
    fi
done
cat > "$site/env.sh" << EOF
export PYTHONPATH="$site\${PYTHONPATH:+:\$PYTHONPATH}"
export LD_LIBRARY_PATH="$nvidia/cudnn/lib:$nvidia/cu13/lib:$nvidia/nccl/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
# Transformer Engine takes a cuDNN of the CUDA toolkit first, whose libraries and torch's do not go together.
export CUDNN_HOME="$nvidia/cudnn"
$kernels
# Else a library that cuDNN cannot load is an error without a name.
export CUDNN_LOGERR_DBG=1 CUDNN_LOGDEST_DBG=stderr
EOF
