# shellcheck shell=bash disable=SC2034,SC2154
# ---- the batch script, on the first node

warned="" driver=""
on_term() { # the run saves and ends; a second signal would end it without saving
  [ -z "$warned" ] || return 0
  warned=yes
  [ -z "$driver" ] || kill -TERM "$driver" 2>/dev/null || true
}
trap on_term TERM

# Ray on one node until the batch script closes the standard input. Slurm may warn the steps alone: before a preemption.
# Then the task beside the batch script passes it on; Ray is in a session of its own, which that signal does not reach.
ray_task() {
  local ray ends tries=0 began=$SECONDS
  trap '[ "$SLURM_PROCID" != 0 ] || kill -TERM "$BATCH"' TERM
  exec 3<&0
  cat <&3 >/dev/null &
  ends=$!
  if [ "$SLURM_PROCID" = 0 ]; then
    start_words head
  else
    wait_for_head
    start_words node
  fi
  while kill -0 "$ends" 2>/dev/null; do
    setsid "${START[@]}" --block </dev/null 3<&- &
    ray=$!
    while kill -0 "$ends" 2>/dev/null && kill -0 "$ray" 2>/dev/null; do wait -n || true; done
    kill -0 "$ends" 2>/dev/null || break
    # Ray gives a node 30 s to join, of which a busy machine may need more
    tries=$((tries + 1))
    [ "$tries" -lt 3 ] && [ $((SECONDS - began)) -lt "$JOIN_S" ] || fail "Ray ended on $(hostname)"
  done
  kill -TERM "$ray" 2>/dev/null
  while kill -0 "$ray" 2>/dev/null; do wait "$ray"; done
  rm -rf "$TEMP_DIR"
  exit 0
}

check_secrets
TEMP_DIR="$TEMP_DIR/ray-$SLURM_JOB_ID"
HEAD=$(own_address) || exit 1
BATCH=$$
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN HEAD BATCH NODES GPUS PORT JOIN_S INTERFACE TEMP_DIR SLURM_EXPORT_ENV=ALL

echo "miles-like: start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, Ray's head at $HEAD:$PORT"
exec 9> >(
  trap '' TERM
  exec srun --ntasks="$NODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash -c "$(declare -f fail own_address wait_for_head start_words ray_task); ray_task"
)
step=$!

status=75
if [ -z "$warned" ] && wait_for_head && python -m miles_like.nodes.joined "$HEAD:$PORT" "$NODES" "$JOIN_S" 9>&-; then
  train_words
  if [ -n "$STOP_S" ] && end=$(date -d "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e)" +%s 2>/dev/null); then
    # the run ends by itself, with status 75, where a step and a save no longer fit in before the signal
    left=$((end - $(date +%s) - STOP_S - 60))
    [ "$left" -le 0 ] || RUN+=(--set "checkpoint.deadline_s=$left")
  fi
  "${RUN[@]}" 9>&- &
  driver=$!
  [ -z "$warned" ] || kill -TERM "$driver" # it came while the run was started
  before=$warned
  wait "$driver"
  status=$?
  if [ "$warned" != "$before" ]; then # the signal ended the wait
    wait "$driver"
    status=$?
  fi
elif [ -z "$warned" ]; then
  status=1
fi

exec 9>&-
while kill -0 "$step" 2>/dev/null; do sleep 0.2; done

# Slurm is about to end a job that is not running any more, or puts it back into the queue itself
state=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)
if [ "$status" != 0 ] && { [ "$status" = 75 ] || [ -n "$warned" ]; } && [ "$state" = RUNNING ]; then
  if [ "${SLURM_RESTART_COUNT:-0}" -ge "$REQUEUES" ]; then
    echo "miles-like: the run ended with status $status after $REQUEUES starts: it is not queued again (--requeues)" >&2
  else
    echo "miles-like: the run ended with status $status: job $SLURM_JOB_ID is queued again and continues it"
    status=75
    scontrol requeue "$SLURM_JOB_ID"
  fi
fi
exit "$status"
