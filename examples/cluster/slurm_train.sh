#!/bin/bash
# A training on two machines with eight GPUs each: sbatch slurm_train.sh /data/my_data /runs/mine
#SBATCH --job-name=mispair-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=12:00:00
#SBATCH --requeue
set -euo pipefail
data=$1 out=$2

# A job that is put back into the queue goes on from its last checkpoint, with whatever number of machines it gets then.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$first:29400" \
    -m mispair train --data "$data" --method mend --model sgr --out "$out"
