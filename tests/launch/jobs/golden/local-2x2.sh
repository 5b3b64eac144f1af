#!/usr/bin/env bash
# standard on DDP, 2 nodes x 2 processes, batch 4 x 1 x 4 = 16, on CPU, 8 cores
set -uo pipefail
set -m  # a process group for each launcher

command=(
    /checkout/launch/train.py
    --recipe standard
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

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}  # the nodes share these cores
port=$((20000 + $$ % 20000))
for rank in {0..1}; do
    python /checkout/launch/host/launcher.py --config_file /checkout/accelerate_configs/standard.yaml --num_machines 2 --num_processes 4 --machine_rank "$rank" --main_process_ip 127.0.0.1 --main_process_port "$port" --rdzv_backend static --same_network "${command[@]}" &
    launchers+=($!)
done
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
