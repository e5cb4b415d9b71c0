#!/usr/bin/env bash
# Submit a run: its broker, and its nodes once that has started.
#
#     submit.sh FOLDER [OPTIONS OF SBATCH FOR THE NODES...]      as in: submit.sh ~/run1 --array=0-15 --partition=gpu
#
# FOLDER is on a file system that all machines share. The broker saves the run and its model there, in FOLDER/broker.
# A folder that holds a run already is gone on with.
set -euo pipefail

[ $# -ge 1 ] || { sed -n '4,7s/^# \{0,4\}//p' "$0" >&2; exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$1"
run=$(cd "$1" && pwd)
shift

cd "$run" # logs are written here
broker=$(ZMQTRAIN_RUN=$run sbatch --parsable "$here/broker.sbatch")
nodes=$(ZMQTRAIN_RUN=$run ZMQTRAIN_BROKER=$broker sbatch --parsable --dependency=after:"$broker" "$@" "$here/nodes.sbatch")

cat <<END
the broker is job $broker, its nodes are job $nodes; logs, checkpoints and the model are in $run
its address, once it runs: tcp://\$(squeue -h -j $broker -o %B):$((20000 + broker % 10000))
to end the run, and keep what it has learnt: zmqtrain stop ADDRESS
END
