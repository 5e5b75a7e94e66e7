#!/bin/bash
# An audit on a Ray cluster of 8 machines: sbatch slurm_audit.sh /data/embeddings /audits/mine
# Both may be in a store (s3://...). A job that is run again goes on where it was interrupted.
#SBATCH --job-name=mispair-audit
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail
data=$1 out=$2
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# Ray starts on all machines, the command on the first one.
srun ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_NNODES" -- \
    mispair audit "$data" --out "$out" --engine ray --address auto
