#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Everything that needs GPUs, once: the tests, what a correction costs, the cost of metrics, and the example over NCCL.
#
#   lab/benchmarks/gpu_run.sh [OUTPUT_DIR]
#
# Expects an environment with what requirements/test.txt names, or near it. Tests that need more GPUs than there are say so.
set -uo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.."
output="${1:-runs/gpu}"
mkdir -p "${output}"
export PYTHONPATH="${PWD}${PYTHONPATH:+:${PYTHONPATH}}"
python -c "import torch, transformers, platform; print('python', platform.python_version(), 'torch', torch.__version__, \
'transformers', transformers.__version__, torch.cuda.device_count(), 'x', torch.cuda.get_device_name())"
python -m pytest -m gpu -q -rs tests 2>&1 | tee "${output}/tests.txt"
python lab/benchmarks/cost_of_metrics.py --device cuda 2>&1 | tee "${output}/cost_of_metrics.txt"
python lab/benchmarks/bench_correction.py --json "${output}/correction_cp1.json" | tee "${output}/correction_cp1.md"
python lab/benchmarks/bench_policy_loss.py --json "${output}/policy_loss.json" | tee "${output}/policy_loss.md"
python lab/benchmarks/bench_methods.py --json "${output}/methods.json" | tee "${output}/methods.md"
for cp in 2 4 8; do
    [ "$(python -c 'import torch; print(torch.cuda.device_count())')" -ge "${cp}" ] || continue
    # The baseline's collectives per sample take seconds per call with 4,096 samples.
    torchrun --standalone --nproc-per-node "${cp}" lab/benchmarks/bench_correction.py --cp "${cp}" \
        --shapes 8x2048 64x2048 256x1024 64x8192 16x32768 --json "${output}/correction_cp${cp}.json" |
        tee "${output}/correction_cp${cp}.md"
done
# Two data-parallel ranks, and two context-parallel ones, which should learn the same.
for cp in 1 2; do
    torchrun --standalone --nproc-per-node 2 examples/train_grpo.py --num-rollout 20 --lr 6e-4 --context-parallel-size "${cp}" \
        --output-dir "${output}/cp${cp}" --overwrite --use-tis --custom-tis-function-path mis_ext.compute_mis_weights_with_cp \
        --custom-config-path yaml/mis.yaml 2>&1 | tail -40 | tee "${output}/cp${cp}.txt"
done
