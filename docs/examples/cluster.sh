#!/bin/bash
#SBATCH --job-name=flwr-replay
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --time=08:00:00

set -euo pipefail
. .venv/bin/activate
export FLWR_REPLAY_HOME=$PWD/flwr-replay
hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
on() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"; }
head=$(on "${hosts[0]}" hostname --ip-address | cut -d' ' -f1)
address=$head:$((20000 + SLURM_JOB_ID % 10000))
size="--num-cpus=$SLURM_CPUS_PER_TASK --num-gpus=4 --disable-usage-stats"

on "${hosts[0]}" ray start --block --head --node-ip-address="$head" --port="${address#*:}" $size &
for host in "${hosts[@]:1}"; do
  on "$host" ray start --block --address="$address" $size &
done
machines="import ray; ray.init('$address', logging_level='error'); print(sum(one['Alive'] for one in ray.nodes()))"
until [ "$(python -c "$machines" 2>/dev/null)" = "$SLURM_NNODES" ]; do sleep 5; done

flwr-replay run --engine ray --ray-address "$address" strategy=fedavg task=mnist task.data-dir="$PWD/mnist" \
  partition=iid nodes=8 model=resnet18 rounds=20 threads=4 client-gpus=1 run-name=eight
