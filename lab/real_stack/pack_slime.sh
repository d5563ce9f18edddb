#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What slime's trainer needs beside torch, SGLang and transformers, in one archive of 44 MB for a machine without a network:
# Ray, the router, and slime and Megatron-LM themselves.
#
#   SLIME_DIR=~/slime MEGATRON_DIR=~/Megatron-LM lab/real_stack/pack_slime.sh OUT.tar.xz
#
# There: tar -xJf OUT.tar.xz -C DIR; export SLIME_DIR=DIR/slime MEGATRON_DIR=DIR/Megatron-LM PYTHONPATH=DIR/numpy1:DIR/site.
# For Python 3.12 on x86-64, glibc 2.28. Left out of Ray is what slime does not import, and of wandb the program that uploads.
set -euo pipefail
: "${SLIME_DIR:?a checkout of slime}" "${MEGATRON_DIR:?a checkout of Megatron-LM with the patch of slime}"
source "$(dirname -- "${BASH_SOURCE[0]}")/packing.sh"
packages=(
    ray==2.60.0 sglang-router==0.3.2 torch_memory_saver==0.0.10 omegaconf==2.4.0 pylatexenc==2.11 platformdirs==4.14.7
    wandb==0.31.0 cwevals==0.0.1b1 googleapis-common-protos==1.76.0 opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2
    opentelemetry-proto==1.45.2 opentelemetry-semantic-conventions==0.66b2 opentelemetry-exporter-http-transport==0.66b2
    opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
)
unpack_wheels all/site "${packages[@]}"
mkdir -p all/numpy1 all/slime all/Megatron-LM
# Headers, scripts and other languages of Ray; libraries of other CUDA releases.
rm -rf all/site/*.data all/site/ray/{rllib,data,tune,train,serve,llm,jars,cpp,tests} all/site/ray/dashboard/client all/site/wandb/bin \
    all/site/torch_memory_saver_hook_mode_{preload,torch}{,_cu12}.abi3.so
find all/site -name '*.so*' -size +1M -exec strip --strip-unneeded {} + 2> /dev/null || true
strip --strip-unneeded all/site/ray/core/src/ray/{raylet/raylet,gcs/gcs_server} 2> /dev/null || true
cp "$here/numpy1/sitecustomize.py" all/numpy1/
cp -r "$SLIME_DIR"/{slime,slime_plugins,train.py,train_async.py,setup.py,docker,scripts,LICENSE} all/slime/
mkdir all/slime/examples
cp -r "$SLIME_DIR/examples/train_infer_mismatch_helper" all/slime/examples/
cp -r "$MEGATRON_DIR"/{megatron,gpt_builders.py,model_provider.py,pretrain_gpt.py,pyproject.toml,LICENSE} all/Megatron-LM/
write_archive
