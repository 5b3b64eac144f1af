#!/usr/bin/env bash
# fast on DDP, 1 node x 1 process, batch 8 x 2 x 1 = 16, on CPU, 8 cores
set -uo pipefail
set -m  # a process group for each launcher

command=(
    /checkout/launch/train.py
    --recipe fast
    --run_name 'a b'
)

launchers=()
told=
tell() {  # each process group: a launcher passes it on to its training processes
    local pid
    told=$1
    for pid in "${launchers[@]}"; do kill -s "$1" -- "-$pid"; done 2>/dev/null
}
trap 'tell TERM' TERM USR1 HUP
trap 'trap "tell QUIT" INT; echo "stopping, after the step in progress if any; Ctrl-C again kills" >&2; tell TERM' INT

python /checkout/launch/host/launcher.py --config_file /checkout/accelerate_configs/fast.yaml --num_machines 1 --num_processes 1 --main_process_port 0 "${command[@]}" &
launchers+=($!)
set +m  # or bash reports their ends
[ -z "$told" ] || tell "$told"  # while they were started

code=0
running=("${launchers[@]}")
while true; do
    failed=$code
    still=()
    for pid in "${running[@]}"; do
        if kill -0 "$pid" 2>/dev/null; then
            still+=("$pid")
        else  # now `wait` returns at once, and no signal ends it before its process
            wait "$pid" && ended=0 || ended=$?
            ((failed || ended <= code)) || code=$ended
        fi
    done
    ((${#still[@]})) || exit "$code"
    running=("${still[@]}")
    ((failed == code)) || tell TERM
    sleep 0.5
done
