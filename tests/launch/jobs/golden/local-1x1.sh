#!/usr/bin/env bash
# fast on DDP, 1 node x 1 process, batch 8 x 2 x 1 = 16, on CPU, 8 cores
set -uo pipefail

command=(
    /checkout/launch/train.py
    --recipe fast
    --run_name 'a b'
)
launchers=()
python /checkout/launch/host/launcher.py --config_file /checkout/accelerate_configs/fast.yaml --num_machines 1 --num_processes 1 --main_process_port 0 "${command[@]}" &
launchers+=($!)

tell() {  # the training processes themselves: bash lets the launchers ignore Ctrl-C
    local pid training
    for pid in "${launchers[@]}"; do
        read -r -d '' -a training < "/proc/$pid/task/$pid/children"
        kill -s "$1" "${training[@]:-$pid}"
    done 2>/dev/null
}
trap 'tell TERM' TERM USR1
trap 'trap "tell KILL" INT; echo "stopping after this step; Ctrl-C again kills" >&2; tell TERM' INT

code=0
for pid in "${launchers[@]}"; do
    while kill -0 "$pid" 2>/dev/null; do  # a signal ends `wait` before its process
        wait "$pid" && ended=0 || ended=$?
    done
    ((ended == 0)) || code=$ended
done
exit "$code"
