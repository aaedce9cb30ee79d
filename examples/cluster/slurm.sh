#!/bin/bash
# Two nodes under SLURM:
#   sbatch examples/cluster/slurm.sh run.yaml --method fcdp
# Two minutes before its time is up the job gets SIGTERM: the run saves a checkpoint, ends with 143, and queues itself again. A
# job that lost a node is queued again by SLURM.
#SBATCH --job-name=blockwalk
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=04:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.out
srun --distribution=block blockwalk train "$@" --resume_from_checkpoint latest
code=$?
if [ "$code" = 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
