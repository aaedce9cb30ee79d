#!/bin/bash
# Machines without a scheduler: the same command on each of them, but for NODE (0, 1, ...).
#   HOST=first-machine NODE=0 bash examples/cluster/torchrun.sh run.yaml --method fcdp
# A run that is killed, or loses a machine, goes on from its newest checkpoint as soon as all of them are back.
for _ in 1 2 3 4 5; do
    PYTHONSAFEPATH=1 torchrun --nnodes "${NODES:-2}" --node-rank "$NODE" --nproc-per-node "${RANKS:-1}" \
        --master-addr "$HOST" --master-port "${PORT:-29500}" \
        -m blockwalk train "$@" --resume_from_checkpoint latest && exit
    sleep "${WAIT:-20}"
done
exit 1
