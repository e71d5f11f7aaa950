# shellcheck shell=bash disable=SC2034,SC2154
# ---- the batch script, on the first node

stopped="" running=""
on_term() { # the run saves and ends; a second signal would end it without saving
  [ -z "$stopped" ] || return 0
  stopped=yes
  [ -z "$running" ] || kill -TERM "$running" 2>/dev/null || true
}
trap on_term TERM

# Ray on one node until SIGUSR1. Slurm may send SIGTERM to the steps alone, to each of their processes: before a
# preemption. The task beside the batch script passes it on; Ray, and all that it starts, must live until the run has
# saved, so SIGTERM is blocked there. SIGINT ends Ray; bash lets its jobs ignore it, until Python takes that back.
ray_task() {
  local ray="" tries=0 look
  local blocked='import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])'
  stopped=""
  trap 'stopped=yes; [ -z "$ray" ] || kill -INT "$ray" 2>/dev/null' USR1
  trap '[ "$SLURM_PROCID" != 0 ] || kill -TERM "$BATCH"' TERM
  if [ "$SLURM_PROCID" = 0 ]; then
    start_words head
  else
    wait_for_head
    start_words node
  fi
  while [ -z "$stopped" ]; do
    setsid python -c "$blocked" "${START[@]}" --block &
    ray=$!
    while kill -0 "$ray" 2>/dev/null; do
      if [ -z "$stopped" ]; then
        wait "$ray"
      else # then again, in case that it was still ignored
        for ((look = 0; look < 100; look++)); do kill -0 "$ray" 2>/dev/null && sleep 0.1; done
        kill -INT "$ray" 2>/dev/null
      fi
    done
    # Ray gives a node 30 s to join, of which a busy machine may need more
    tries=$((tries + 1))
    if [ -z "$stopped" ] && { [ "$tries" -ge 3 ] || [ "$SECONDS" -gt "$JOIN_S" ]; }; then fail "Ray ended on $(hostname)"; fi
  done
  rm -rf "$TEMP_DIR"
  exit 0
}

watched() { # a command that on_term reaches, and its status
  local before status
  "$@" &
  running=$!
  [ -z "$stopped" ] || kill -TERM "$running"
  before=$stopped
  wait "$running"
  status=$?
  if [ "$stopped" != "$before" ]; then # the signal ended the wait
    wait "$running"
    status=$?
  fi
  running=""
  return "$status"
}

check_secrets
TEMP_DIR="$TEMP_DIR/ray-$SLURM_JOB_ID"
HEAD=$(own_address) || exit 1
BATCH=$$
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN HEAD BATCH NODES GPUS PORT JOIN_S INTERFACE TEMP_DIR SLURM_EXPORT_ENV=ALL

echo "miles-like: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, Ray's head at $HEAD:$PORT"
setsid srun --ntasks="$NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
  bash -c "$(declare -p RAY_OPTIONS); $(declare -f fail own_address wait_for_head start_words ray_task); ray_task" </dev/null &
step=$!

wait_for_head
if watched python -m miles_like.nodes.joined "$HEAD:$PORT" "$NODES" "$JOIN_S"; then
  train_words
  if [ -n "$STOP_S" ] && end=$(date -d "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e)" +%s 2>/dev/null); then
    # the run ends by itself, with status 75, where a step and a save no longer fit in before the signal
    left=$((end - $(date +%s) - STOP_S - 60))
    [ "$left" -le 0 ] || RUN+=(--set "checkpoint.deadline_s=$left")
  fi
  watched "${RUN[@]}"
fi
status=$?

# srun passes it on to the tasks, once they are there
while kill -USR1 "$step" 2>/dev/null; do sleep 0.5; done

# Where its state is another one, Slurm ends the job, or puts it back into the queue, by itself
state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)
if [ "$status" != 0 ] && { [ "$status" = 75 ] || [ -n "$stopped" ]; } && [ "$state" = RUNNING ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "$REQUEUES" ]; then
    echo "miles-like: the run ended with status $status after $REQUEUES further starts: raise --requeues" >&2
  else
    echo "miles-like: the run ended with status $status: job $SLURM_JOB_ID is queued again and continues it"
    status=75
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$status"
