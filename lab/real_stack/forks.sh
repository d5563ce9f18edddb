#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs that fork at the alert, on a machine with GPUs and no network, step by step. pack_forks.sh makes what is carried there.
#
#   forks.sh base FOLDER       # unpack what is not the model, and try everything with random weights, in the background
#   forks.sh take FOLDER       # keep a piece of the model
#   forks.sh start SECONDS OUT # put the pieces together, and begin: one process a run, in the background; then poll
#   forks.sh poll SECONDS OUT  # wait so long or until all have ended; then a table, and the results as files in OUT
#
# A machine that is taken back when no command runs loses every state: leave less than 30 seconds between commands, and
# poll for as long as one command may take. A process that dies begins again, from its alert if it had one. ONLY at the
# start: names of runs, else all of the study. STUDY=fp8_training, SMOKE=fp8_smoke and REPORT=fp8 run that study; SHARE is
# the part of a GPU's memory for a run. GPUS, PLACE and DEVICE are for tests.
set -euo pipefail
place="${PLACE:-${TMPDIR:-/tmp}/fork}" study="${STUDY:-alert_forks}" smoke="${SMOKE:-alert_smoke}"
code="$place/code" python="${PYTHON:-python3}"
export PYTHONPATH="$code:$place/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo
[[ ! -e "$place/REVISION" ]] || REVISION="$(cat "$place/REVISION")" && export REVISION

# run_one GPU RESULTS MODEL STUDY GROUP SHARE: until it has finished, three times at most.
run_one() {
    local attempt log="$place/logs/$5.log"
    for attempt in 1 2 3; do
        echo "== $5 on GPU $1, attempt $attempt, $(date +%T)" >> "$log"
        ! CUDA_VISIBLE_DEVICES="$1" "$python" "$code/lab/studies/evidence.py" run "$4" --only "$5" --results "$2" \
            --model "$3" --memory-share "$6" ${DEVICE:+--device "$DEVICE"} >> "$log" 2>&1 || break
        sleep 5
    done
    echo "== $5 ended, $(date +%T)" >> "$log"
}

# run_all RESULTS MODEL STUDY SHARE [RUNS]: a process for each run; the GPUs in turn, and back, so that each has one of
# an arm. A run that forks from another waits for it with its engine started.
run_all() {
    local index=0 group gpus="${GPUS:-$(nvidia-smi --list-gpus | wc -l)}"
    mkdir -p "$1" "$place/logs"
    cp "$place/gsm_symbolic.json" "$1"
    for group in ${5:-$(groups_of "$3")}; do
        run_one $(((index + index / gpus) % gpus)) "$1" "$2" "$3" "$group" "$4" &
        index=$((index + 1))
        # SGLang counts what others allocate while it starts.
        sleep "${STAGGER:-3}"
    done
    wait
}

groups_of() {
    (cd "$code/lab/studies" && "$python" -c "import sys, evidence
from evidence.pretrained import fork, fp8
print(*[group.name for study in fork.FORK_STUDIES + fp8.FP8_STUDIES if study.name == sys.argv[1] for group in study.groups])" "$1")
}

case "$1" in
    base)
        mkdir -p "$place/pieces" "$place/logs"
        cp "$0" "$place/forks.sh"
        for archive in base code; do tar -xJf "$2/$archive.tar.xz" -C "$place"; done
        command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=name,memory.used,memory.total --format=csv
        "$python" -c "import torch, transformers; print(torch.__version__, transformers.__version__, torch.cuda.device_count())"
        nproc --all && df -h "$place" | tail -n 1 && free -g | sed -n 2p
        # The start waits for it, however late its process begins.
        touch "$place/trying"
        setsid bash "$place/forks.sh" try > "$place/logs/try.log" 2>&1 < /dev/null &
        ;;
    try)
        echo $$ > "$place/trying"
        cp -r "$place/qwen" "$place/random"
        "$python" "$code/lab/real_stack/qwen_model.py" random "$place/random"
        run_all "$place/smoke" "$place/random" "$smoke" 0.45
        touch "$place/tried"
        ;;
    take)
        mv "$2"/piece.* "$place/pieces/"
        ls "$place/pieces" | wc -l
        tail -qn 2 "$place"/logs/*.log | cut -c 1-200
        ;;
    start)
        : "${2:?seconds to poll}" "${3:?folder of what comes out}"
        out="$(realpath -- "$3")"
        cd "$place"
        cat pieces/piece.* > qwen.gguf
        sha256sum -c qwen.sha256
        time "$python" "$code/lab/real_stack/qwen_model.py" weights "$place/qwen.gguf" "$place/qwen" "$(nproc --all)"
        if [[ -e "$place/trying" ]]; then
            for ((second = 0; second < ${PATIENCE:-60}; second++)); do [[ ! -e "$place/tried" ]] || break; sleep 1; done
            [[ -e "$place/tried" ]] || tail -qn 2 "$place/logs/$smoke"*.log || true
        fi
        ls "$place/smoke" || echo "no trial with random weights: the first run compiles what it would have compiled"
        setsid bash "$place/forks.sh" go > "$place/logs/go.log" 2>&1 < /dev/null &
        exec bash "$place/forks.sh" poll "$2" "$out"
        ;;
    go)
        # What the trial still holds of the GPUs.
        [[ -e "$place/tried" || ! -e "$place/trying" ]] || kill -KILL -- "-$(cat "$place/trying")" || true
        run_all "$place/results" "$place/qwen" "$study" "${SHARE:-0.47}" "${ONLY:-}"
        touch "$place/ended"
        ;;
    poll)
        for ((second = 0; second < $2; second++)); do [[ ! -e "$place/ended" ]] || break; sleep 1; done
        command -v nvidia-smi > /dev/null && nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader
        grep -h "^== \|kept in\|Error" "$place/logs/$study"*.log | tail -n 24 || true
        ls -l "$place/results" 2> /dev/null | awk '/state/ {print $5, $9}' || true
        df -h "$place" | tail -n 1
        "$python" "$code/lab/studies/evidence.py" "${REPORT:-forks}" --results "$place/results" | tee "$3/table.md"
        # They are written all the while, of which tar complains.
        (cd "$place" && find results smoke -name '*.zip') | tar -C "$place" -czf "$3/results.tar.gz" --files-from - || true
        tar -C "$place" -czf "$3/logs.tar.gz" logs || true
        [[ -e "$place/ended" ]] || echo "not ended: poll again within 30 seconds"
        ;;
    *) echo "forks.sh base|take|start|poll, got $1" >&2; exit 1 ;;
esac
