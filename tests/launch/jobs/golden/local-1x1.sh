#!/usr/bin/env bash
# fast on DDP, 1 node x 1 process, batch 8 x 2 x 1 = 16, on CPU, 8 cores
set -uo pipefail

command=(
    /checkout/launch/train.py
    --recipe fast
    --run_name 'a b'
)

exec python /checkout/launch/host/launcher.py --config_file /checkout/accelerate_configs/fast.yaml --num_machines 1 --num_processes 1 --main_process_port 0 "${command[@]}"
