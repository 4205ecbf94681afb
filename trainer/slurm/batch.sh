#!/bin/bash
# @about
# @directives

umask o-w # Strangers may not write what this job creates.

# @settings

# ---- the environment of this shell and of all ranks
# @setup
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
LONGHAUL_BEGAN="$(cat /proc/sys/kernel/random/boot_id) $(cut -d " " -f 1 /proc/uptime)" # what job.max_minutes counts from
export LONGHAUL_BEGAN
# Only this job's ranks know it. The environment reaches them from this shell: no command line and no file has it.
LONGHAUL_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d " \n")
export LONGHAUL_SECRET

# ---- helpers
requeues=${SLURM_RESTART_COUNT:-0} # how often this job was requeued
signalled=0                        # 1 once USR1 arrived: the time limit is near
interrupted=0                      # 1 if USR1 arrived during the current wait
srun_pid=0                         # process id of the ranks' srun; 0 if none is running

log() { echo "job $SLURM_JOB_ID: $*"; }

newest() { # the number of the newest checkpoint, on disk or in memory, 0 without any
    local name most=0 in_memory="$RUN/checkpoints/newest"
    for name in "$RUN"/checkpoints/step-* "/step-$([[ -f $in_memory ]] && cut -d " " -f 1 "$in_memory")"; do
        name=${name##*/step-}
        if [[ $name =~ ^(0|[1-9][0-9]*)$ ]] && ((name > most)); then most=$name; fi
    done
    echo "$most"
}

has_marker() { # whether this attempt wrote marker $1; another run in the folder may have written one too
    grep -qsF "\"attempt\": \"$LONGHAUL_ATTEMPT\"" "$RUN/$1"
}

await() { # waits for process $1 and sets $status to its exit status; a trapped signal does not end the wait
    while interrupted=0; do
        wait "$1"
        status=$?
        ((interrupted)) || return
    done
}

requeue() { # does not return
    if ((requeues >= MAX_REQUEUES)); then
        log "already requeued $requeues times (slurm.max_requeues)"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        log "requeued"
        sleep 300 # The scheduler ends this shell first.
    fi
    log "could not be requeued: submit again to resume the run"
    exit 1
}

# Near the time limit, the scheduler signals only this shell; srun forwards the signal to every rank, once.
# TERM is deliberately not trapped: it ends this shell, which makes scancel final.
trap 'signalled=1 interrupted=1; ((srun_pid == 0)) || kill -USR1 "$srun_pid"' USR1

# ---- report of nodes and code
log "requeue $requeues, running on $SLURM_JOB_NODELIST, code $(git -C "$ROOT" describe --always --dirty --abbrev=40 2>/dev/null || echo "not under git")"
# @report
wait $!

# ---- nodes that train
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
used=$(IFS=, && echo "${nodes[*]:0:$NODES}")
if ((PREFLIGHT)); then
    rm -rf "$RUN/slurm/preflight" # of an earlier launch
    # @preflight
    wait $!
    used=$("$OUTSIDE_PYTHON" -P -m trainer.slurm.choose_nodes "$RUN" "$NODES" "${nodes[@]}") || exit
    log "training on $used"
fi
export MASTER_ADDR=${used%%,*}

# ---- launch the ranks until the run is done or cannot continue
mkdir -p "$RUN/slurm"
((requeues)) || echo 0 >"$RUN/slurm/stuck"
stuck=$(cat "$RUN/slurm/stuck" 2>/dev/null || echo 0) # consecutive launches without a new checkpoint, across requeues
for ((attempt = 0; ; attempt++)); do
    ((signalled)) && requeue
    before=$(newest)
    export LONGHAUL_ATTEMPT=$SLURM_JOB_ID.$requeues.$attempt
    # Differs from the port of the previous attempt and from those of other jobs on these nodes.
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + requeues * 3 + attempt) % 10000))
    # @launch
    srun_pid=$!
    ((signalled)) && kill -USR1 "$srun_pid" # It arrived while srun was starting.
    await "$srun_pid"
    srun_pid=0
    after=$(newest)
    log "attempt $LONGHAUL_ATTEMPT exited with $status, newest checkpoint: step $after"

    if has_marker DONE; then
        log "done"
        exit 0
    elif has_marker STOP; then
        log "stopped, a restart cannot help: $(cat "$RUN/STOP")"
        exit 78
    elif ((status == 2 || status == 78)); then
        log "exited with $status, a restart cannot help"
        exit "$status"
    fi

    stuck=$((stuck + 1))
    if has_marker REQUEUE || ((after > before)); then stuck=0; fi
    echo "$stuck" >"$RUN/slurm/stuck" || log "cannot write the failure count to $RUN/slurm"
    if ((stuck >= MAX_STUCK)); then
        log "giving up: $stuck consecutive launches without a new checkpoint (slurm.max_stuck)"
        exit 1
    fi
    if has_marker REQUEUE || ((signalled)); then requeue; fi

    # Ranks crashed, or a stage ended and the next one starts: launch them again.
    ((stuck == 0)) || log "restarting in $((stuck * BACKOFF)) s"
    sleep $((stuck * BACKOFF)) &
    wait $!
done
