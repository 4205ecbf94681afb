#!/bin/bash
# @about
# @directives

# @settings

# ---- the environment of this shell and of all ranks
# @setup
export PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR
LONGHAUL_BEGAN=$(date +%s) # what job.max_minutes counts from
export LONGHAUL_BEGAN

# ---- small things
life=${SLURM_RESTART_COUNT:-0} # how often this job was requeued
told=0                         # 1 from USR1 on: this life ends soon
heard=0                        # 1 if USR1 came while this shell waited
step=0                         # process id of the srun of the ranks; 0 while there is none

say() { echo "job $SLURM_JOB_ID: $*"; }

newest() { # the number of the newest checkpoint, 0 without any
    local name most=0
    for name in "$RUN"/checkpoints/step-*; do
        name=${name##*/step-}
        if [[ $name =~ ^(0|[1-9][0-9]*)$ ]] && ((name > most)); then most=$name; fi
    done
    echo "$most"
}

left() { # whether this attempt left marker $1; another start in the folder may have left one of its own
    grep -qsF "\"attempt\": \"$LONGHAUL_ATTEMPT\"" "$RUN/$1"
}

await() { # waits for process $1 and leaves its exit status in $status; a trapped signal does not end the wait
    while heard=0; do
        wait "$1"
        status=$?
        ((heard)) || return
    done
}

requeue() { # does not return
    if ((life >= MAX_REQUEUES)); then
        say "was requeued $life times, the most that slurm.max_requeues allows"
    elif scontrol requeue "$SLURM_JOB_ID"; then
        say "requeued"
        sleep 300 # The scheduler ends this shell meanwhile.
    fi
    say "could not be requeued: submit it again, and the run goes on"
    exit 1
}

# The scheduler tells this shell, and nobody else, that the time limit is near; srun hands it on to every rank, once.
# TERM is not trapped on purpose: it ends this shell, and so scancel is final.
trap 'told=1 heard=1; ((step == 0)) || kill -USR1 "$step"' USR1

# ---- what this job runs on and with
say "life $life on $SLURM_JOB_NODELIST, code $(git -C "$ROOT" describe --always --dirty --abbrev=40 2>/dev/null || echo "not under git")"
# @report
wait $!

# ---- the ranks, again and again until something ends them for good
mkdir -p "$RUN/slurm"
((life)) || echo 0 >"$RUN/slurm/stuck"
stuck=$(cat "$RUN/slurm/stuck" 2>/dev/null || echo 0) # starts in a row without a new checkpoint, over all lives
for ((attempt = 0; ; attempt++)); do
    ((told)) && requeue
    before=$(newest)
    export LONGHAUL_ATTEMPT=$SLURM_JOB_ID.$life.$attempt
    # One that this job did not just use, and that its neighbours do not use.
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID * 7 + life * 3 + attempt) % 10000))
    # @launch
    step=$!
    ((told)) && kill -USR1 "$step" # It came while srun started.
    await "$step"
    step=0
    after=$(newest)
    say "attempt $LONGHAUL_ATTEMPT ended with $status, newest checkpoint: step $after"

    if left DONE; then
        say "done"
        exit 0
    elif left STOP; then
        say "stopped, a retry cannot mend it: $(cat "$RUN/STOP")"
        exit 78
    elif ((status == 2 || status == 78)); then
        say "left with $status, a retry cannot mend it"
        exit "$status"
    fi

    stuck=$((stuck + 1))
    if left REQUEUE || ((after > before)); then stuck=0; fi
    echo "$stuck" >"$RUN/slurm/stuck" || say "the count of such starts cannot be kept in $RUN/slurm"
    if ((stuck >= MAX_STUCK)); then
        say "$stuck starts in a row without a new checkpoint: giving up"
        exit 1
    fi
    if left REQUEUE || ((told)); then requeue; fi

    # Otherwise ranks crashed, or a stage ended and the next is to begin: they are started again.
    ((stuck == 0)) || say "starting again in $((stuck * BACKOFF)) s"
    sleep $((stuck * BACKOFF)) &
    wait $!
done
