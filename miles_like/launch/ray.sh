# shellcheck shell=bash disable=SC2034,SC2154
# ---- the commands

# Beside the run directory, which a first start must not find: the cluster's token and the head's address, which nodes
# read from the disk that they share.
SHARED="$RUN_DIR.ray"
export RAY_AUTH_TOKEN_PATH="$SHARED/token"

read_head() {
  local until=$((SECONDS + JOIN_S))
  until [ -s "$SHARED/head" ]; do
    [ "$SECONDS" -lt "$until" ] || fail "there is no $SHARED/head after $JOIN_S s: run '$0 head' on the first node"
    sleep 1
  done
  HEAD=$(cat "$SHARED/head")
}

case ${1:-} in
  head)
    umask 077
    mkdir -p "$SHARED" || fail "$SHARED cannot be made"
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH"
    start_words head && "${START[@]}" || fail "Ray did not start on $(hostname)"
    own_address >"$SHARED/head.new" && mv "$SHARED/head.new" "$SHARED/head"
    ;;
  node)
    read_head
    wait_for_head
    for try in 1 2 3; do # Ray gives a node 30 s to join, of which a busy machine may need more
      start_words node && "${START[@]}" && exit 0
      echo "miles-like: Ray did not start on $(hostname), try $try of 3" >&2
    done
    exit 1
    ;;
  train)
    check_secrets
    read_head
    wait_for_head
    python -m miles_like.nodes.joined "$HEAD:$PORT" "$NODES" "$JOIN_S" || exit 1
    train_words
    exec "${RUN[@]}"
    ;;
  stop)
    ray stop
    rm -rf "$TEMP_DIR"
    if [ -s "$SHARED/head" ] && [ "$(cat "$SHARED/head")" = "$(own_address)" ]; then rm -r "$SHARED"; fi
    ;;
  *)
    fail "usage: bash $0 head | node | train | stop"
    ;;
esac
