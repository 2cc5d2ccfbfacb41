"""A batch script for Slurm: srun starts the ranks, which save and come back after the time limit.

Slurm signals the ranks some time before the job's limit. They save, and end with status 75
(`hvd.EXIT_STOPPED`); the script then queues the job again.
"""

from __future__ import annotations

import math
import shlex

from hvdlite.errors import ArgumentError
from hvdlite.launch.emit import EmitRequest

_WARNING_SECONDS = 120  # before the time limit; Slurm may signal up to a minute earlier

_SCRIPT = """\
#!/bin/bash
# A training job with {ranks} ranks, from `hvdlite-run --emit slurm`. Submit it with sbatch.
# Options of sbatch, such as --time or --gres, may be added here or given on its command line.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks={ranks}
#SBATCH --ntasks-per-node={ranks_per_node}
# All ranks get this signal so many seconds before the time limit; hvd.stop_on() waits for it.
#SBATCH --signal=USR1@{warning}
# The job may start again, and then goes on with the same output file.
#SBATCH --requeue
#SBATCH --open-mode=append

# Every start has a secret and a number of its own, so that nothing left over can join it.
export HVDLITE_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')
export HVDLITE_EPOCH=${{SLURM_RESTART_COUNT:-0}}
{exports}
# The ranks get these signals, too. The script stays, to see how they end.
trap : TERM USR1
# Ranks that fail end the others by themselves. srun must not: one rank may save while others ended.
srun --kill-on-bad-exit=0 --wait=0 {command}
status=$?

# 75 says: stopped by request, run me again. A job that is cancelled does not run any more here.
if [ $status = 75 ] && [ "$(squeue -h -j "$SLURM_JOB_ID" -o %T)" = RUNNING ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
"""


def slurm(request: EmitRequest) -> str:
    """Return the batch script; raise ArgumentError for an image, which Slurm does not need."""
    if request.image is not None:
        raise ArgumentError("--image: the ranks of a Slurm job run without a container image")
    exports = "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in request.variables.items()
    )
    return _SCRIPT.format(
        name=shlex.quote(request.name),
        nodes=request.nodes,
        ranks=request.ranks,
        ranks_per_node=request.ranks_per_node,
        warning=max(_WARNING_SECONDS, math.ceil(request.grace)),
        exports=exports,
        command=shlex.join(request.command),
    )
