#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What Miles' Megatron trainer needs beside pack_slime.sh's archive, SGLang and transformers, in one archive of 32 MB for a
# machine without a network: mbridge, polars, and Miles and its fork of Megatron-LM themselves.
#
#   MILES_DIR=~/miles MILES_MEGATRON_DIR=~/Megatron-LM-miles lab/real_stack/pack_miles.sh OUT.tar.xz
#
# There: tar -xJf OUT.tar.xz -C DIR; export MILES_DIR=DIR/miles MILES_MEGATRON_DIR=DIR/Megatron-LM, and DIR/site on the
# Python path before slime's site. LEAN=1 leaves out the binary of polars: 3 MB, without --dump-details.
set -euo pipefail
: "${MILES_DIR:?a checkout of Miles}" "${MILES_MEGATRON_DIR:?a checkout of its fork of Megatron-LM}"
source "$(dirname -- "${BASH_SOURCE[0]}")/packing.sh"
unpack_wheels all/site mbridge==0.15.1 h2==4.4.1 hpack==4.2.0 hyperframe==6.1.0 polars==1.42.1 prometheus_client==0.26.0 \
    $([[ -n "${LEAN:-}" ]] || echo polars-runtime-32==1.42.1)
find all/site -name '*.so' -size +1M -exec strip --strip-unneeded {} +
mkdir -p all/miles/examples/infra_features all/Megatron-LM
cp -r "$MILES_DIR"/{miles,miles_plugins,tools,train.py,train_async.py,setup.py,LICENSE} all/miles/
cp -r "$MILES_DIR/examples/infra_features/train_infer_mismatch_helper" all/miles/examples/infra_features/
cp -r "$MILES_MEGATRON_DIR"/{megatron,miles_megatron_plugins,gpt_builders.py,model_provider.py,pretrain_gpt.py} all/Megatron-LM/
cp "$MILES_MEGATRON_DIR"/{pyproject.toml,LICENSE} all/Megatron-LM/
write_archive
