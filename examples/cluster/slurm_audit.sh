#!/bin/bash
# An audit in 64 pieces: id=$(sbatch --parsable slurm_audit.sh /data/embeddings /audits/mine)
# and when all have ended: sbatch --dependency=afterok:$id --wrap "mispair audit --merge /audits/mine"
#SBATCH --job-name=mispair-audit
#SBATCH --array=1-64
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=04:00:00
#SBATCH --requeue
set -euo pipefail
data=$1 out=$2

# The first piece to start learns what all need; the others wait for it. A piece that is run again keeps what it has done.
mispair audit "$data" --out "$out" --shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT"
