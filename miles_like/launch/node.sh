# shellcheck shell=bash disable=SC2034,SC2154
# ---- what every node does

# Ray on each node: workers keep the priority of the node's other processes, and none waits idle for a rank, whose
# environment is another one. Only a process with the token may join, for a port of a shared cluster is open to all users.
export RAY_worker_niceness=0 RAY_prestart_worker_first_driver=0 RAY_AUTH_MODE=token
unset RAY_ADDRESS
[ -z "$ENVIRONMENT" ] || export PATH="$ENVIRONMENT/bin:$PATH"

fail() {
  echo "miles-like: $*" >&2
  exit 1
}

# The address by which other nodes reach this one: of INTERFACE, or else of its host name, unless /etc/hosts maps that to
# the loopback device, as Debian writes it.
own_address() {
  local found
  if [ -n "$INTERFACE" ]; then
    found=$(ip -4 -o address show dev "$INTERFACE" scope global 2>/dev/null | awk '{ sub("/.*", "", $4); print $4; exit }')
    [ -n "$found" ] || fail "$(hostname) has no IPv4 address on $INTERFACE: correct --interface"
  else
    found=$(getent ahostsv4 "$(hostname)" | awk '$1 !~ /^127\./ { print $1; exit }')
    [ -n "$found" ] || found=$(hostname -I | awk '{ print $1 }')
    [ -n "$found" ] || fail "$(hostname) has no address that other nodes reach: name its network with --interface"
  fi
  echo "$found"
}

# until the head at HEAD listens
wait_for_head() {
  local until=$((SECONDS + JOIN_S))
  until [ -n "${stopped:-}" ] || (exec 3<>"/dev/tcp/$HEAD/$PORT") 2>/dev/null; do
    [ "$SECONDS" -lt "$until" ] || fail "Ray's head does not answer at $HEAD:$PORT after $JOIN_S s, asked by $(hostname)"
    sleep 1
  done
}

# words of `ray start` on this node, in START; argument: head or node
start_words() {
  START=(ray start --node-ip-address="$(own_address)" --num-gpus="$GPUS" --disable-usage-stats --temp-dir="$TEMP_DIR")
  START+=("${RAY_OPTIONS[@]}")
  case $1 in
    head) START+=(--head --port="$PORT" --include-dashboard=false) ;;
    node) START+=(--address="$HEAD:$PORT") ;;
  esac
}

check_secrets() {
  local name
  for name in "${SECRETS[@]}"; do
    [ -n "${!name:-}" ] || fail "the environment has no $name, which the configuration takes from it: export $name first"
  done
}

# words of the run in RUN, which continues what is in its directory
train_words() {
  RUN=("${TRAIN[@]}" --ray-address "$HEAD:$PORT")
  [ ! -d "$RUN_DIR" ] || RUN+=(--resume)
}
