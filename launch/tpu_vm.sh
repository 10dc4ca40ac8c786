#!/usr/bin/env bash
# A TPU VM from request to deletion.
#
#   launch/tpu_vm.sh [--dry_run] [--NAME=VALUE ...] COMMAND [...]
#
#   create           request the machine as a queued resource
#   wait             until it is there
#   install          copy this checkout (HEAD) to all workers and install it
#   run WORDS...     run a command in the repository on all workers
#   fetch [FOLDER]   copy runs/ of worker 0 to FOLDER (default: here)
#   delete           delete the machine, which costs until then
#   all WORDS...     create, wait, install, run; fetch and delete when run ended.
#                    A machine that is there already is left alone, and one
#                    whose results cannot be fetched is kept.
#
# Settings, also as environment variables in capitals:
#   --project, --zone           of Google Cloud; needed
#   --tpu=fedjax-ssl            name of the machine
#   --type=v5litepod-8          accelerator type; more than 8: several hosts
#   --image=v2-alpha-tpuv5-lite runtime version that belongs to the type
#   --spot=no                   yes: cheaper, and may be taken away
#   --extras=tpu                extras to install
#   --poll=30                   seconds between two looks while waiting
#
# --dry_run prints every command, quoted for a shell, and runs none.
set -euo pipefail
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
usage() { sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; }

PROJECT="${PROJECT-}" ZONE="${ZONE-}" TPU="${TPU-fedjax-ssl}"
TYPE="${TYPE-v5litepod-8}" IMAGE="${IMAGE-v2-alpha-tpuv5-lite}"
SPOT="${SPOT-no}" EXTRAS="${EXTRAS-tpu}" POLL="${POLL-30}"
dry_run=no
while [[ "${1-}" == --* ]]; do
  case "$1" in
    --dry_run) dry_run=yes ;;
    --help) usage; exit 0 ;;
    --project=*) PROJECT="${1#*=}" ;;
    --zone=*) ZONE="${1#*=}" ;;
    --tpu=*) TPU="${1#*=}" ;;
    --type=*) TYPE="${1#*=}" ;;
    --image=*) IMAGE="${1#*=}" ;;
    --spot=*) SPOT="${1#*=}" ;;
    --extras=*) EXTRAS="${1#*=}" ;;
    --poll=*) POLL="${1#*=}" ;;
    *) fail "$1 is no setting; --help lists them." ;;
  esac
  shift
done
command="${1-}"
[[ -n "$command" ]] || { usage >&2; exit 2; }
shift
for name in PROJECT ZONE TPU TYPE IMAGE; do
  [[ -n "${!name}" ]] || fail "give --${name,,}= or the variable $name."
done
[[ "$TPU" =~ ^[a-z]([a-z0-9-]*[a-z0-9])?$ ]] \
  || fail "--tpu=$TPU must be a-z, 0-9 and -, and begin with a letter."
for name in PROJECT ZONE TYPE IMAGE; do
  [[ "${!name}" =~ ^[A-Za-z0-9][A-Za-z0-9.:_-]*$ ]] \
    || fail "--${name,,}=${!name} must be letters, digits and .:_-"
done
[[ "$SPOT" == yes || "$SPOT" == no ]] || fail "--spot=$SPOT must be yes or no."
[[ "$POLL" =~ ^[0-9]+$ ]] || fail "--poll=$POLL must be seconds."
[[ "$EXTRAS" =~ ^[a-z,]+$ ]] || fail "--extras=$EXTRAS must be names."

# Of every family, types of more than 8 have several hosts. There an experiment
# is one run over all of them, or each host would run a copy.
pod=()
one_run() {
  [[ "$TYPE" =~ -([0-9]+)$ ]] || return 0
  ((10#${BASH_REMATCH[1]} > 8)) || return 0
  local word
  for word in "$@"; do
    [[ "$word" != *--distributed* ]] || return 0
  done
  local before=""
  for word in "$@"; do
    case "${before##*/} $word" in
      fedjax[-_]ssl\ train | fedjax[-_]ssl\ repeat | fedjax[-_]ssl\ evaluate)
        pod=(--distributed) ;;
      *fedjax[-_]ssl\ sweep* | *fedjax[-_]ssl\ tables* \
        | *fedjax[-_]ssl\ bench* | *launch/sweep.py | *launch/sweep.py\ * \
        | *experiments/bench.py | *experiments/bench.py\ *)
        fail "--type=$TYPE has several hosts, each of which would run the grid;" \
          "take one of 8 or fewer, and several machines for more." ;;
      *make\ quickstart*)
        fail "--type=$TYPE has several hosts, each of which would run a copy;" \
          "take one of 8 or fewer, or 'fedjax-ssl train'." ;;
    esac
    before="$word"
    case "$word" in
      *fedjax[-_]ssl\ train* | *\ *experiments/*.py* | *experiments/*.py*\ *)
        fail "--type=$TYPE has several hosts, each of which would run a copy;" \
          "add --distributed to the experiment's flags." ;;
      *experiments/benchmarks/*.py)
        fail "--type=$TYPE has several hosts, and ${word##*/} measures one;" \
          "take one of 8 or fewer." ;;
      *experiments/*.py)
        # Of our own files, tools know no such flag.
        if [[ ! -f "$repository/experiments/${word##*/}" ]] \
          || grep -q '^  cli\.run_setting(' "$repository/experiments/${word##*/}"
        then
          pod=(--distributed)
        fi ;;
    esac
  done
}

# A setting behind the command would reach the machine, and run there for real.
no_setting() {
  [[ "${1-}" != --* ]] || fail "$1: settings go before the command."
}

scratch="" asking=no delete_at_end=no
at_exit() {
  local code=$?
  [[ -z "$scratch" ]] || rm -rf "$scratch"
  if [[ "$asking" == yes ]]; then
    hint "the request may have been taken all the same; look, and delete it:" \
      describe delete
  fi
  if [[ "$delete_at_end" == yes ]] && ! delete; then
    hint "the machine could not be deleted and costs; delete it:" delete
    ((code)) || code=1
  fi
  exit "$code"
}
trap at_exit EXIT

[[ "$dry_run" == yes ]] || command -v gcloud >/dev/null \
  || fail "there is no program gcloud; install it, or give --dry_run."
place=("--project=$PROJECT" "--zone=$ZONE")
vm=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)

# Says something, and the commands that help.
hint() {
  local dry_run=yes
  printf 'error: %s\n' "$1" >&2
  for helper in "${@:2}"; do "$helper" >&2; done
}

# Prints a command, or runs it.
do_it() {
  if [[ "$dry_run" == yes ]]; then
    printf '%q ' "$@"
    printf '\n'
  else
    "$@"
  fi
}

# Runs a shell command on all workers, or on those given.
on_workers() {
  do_it "${vm[@]}" ssh "$TPU" "${place[@]}" --worker="${2-all}" --command="$1"
}

describe() {
  do_it "${queue[@]}" describe "$TPU" "${place[@]}" \
    '--format=value(state.state)'
}

create() {
  local options=("--node-id=$TPU" "--accelerator-type=$TYPE"
    "--runtime-version=$IMAGE")
  [[ "$SPOT" == no ]] || options+=(--spot)
  do_it "${queue[@]}" create "$TPU" "${place[@]}" "${options[@]}"
}

wait_for_it() {
  local state
  if [[ "$dry_run" == yes ]]; then
    describe
    return
  fi
  while true; do
    state="$(describe)" || fail "the request $TPU cannot be looked up."
    case "$state" in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | DELETING)
        fail "the request $TPU is $state; delete it and create it anew." ;;
    esac
    printf '%s is %s\n' "$TPU" "${state:-requested}" >&2
    sleep "$POLL"
  done
}

install() {
  local archive=fedjax_ssl.tar
  if [[ "$dry_run" == no ]]; then
    scratch="$(mktemp -d)"
    archive="$scratch/$archive"
  fi
  do_it git -C "$repository" archive --prefix=fedjax_ssl/ -o "$archive" HEAD
  do_it "${vm[@]}" scp "$archive" "$TPU:fedjax_ssl.tar" "${place[@]}" \
    --worker=all
  # Many images have Python 3.10; then 3.11 comes from the deadsnakes archive.
  on_workers "set -e
tar xf fedjax_ssl.tar
python=\$(command -v python3.13 || command -v python3.12 || command -v python3.11 || true)
if [ -z \"\$python\" ]; then
  sudo add-apt-repository -y ppa:deadsnakes/ppa
  sudo apt-get install -y python3.11-venv
  python=python3.11
fi
\$python -m venv fedjax_ssl/.venv
cd fedjax_ssl
mkdir -p runs
.venv/bin/python -m pip install -q -c requirements.lock -e '.[$EXTRAS]'
.venv/bin/python -c 'import jax; print(jax.devices())'"
}

# The words are quoted once more: they pass through the workers' shell.
run() {
  [[ -n "${1-}" ]] || fail "run needs a command, as in: run python" \
    "experiments/digits_dirdir.py --workdir=runs/digits"
  on_workers "cd fedjax_ssl && PATH=\$PWD/.venv/bin:\$PATH $(printf '%q ' "$@")"
}

fetch() {
  do_it mkdir -p "${1-.}"
  do_it "${vm[@]}" scp --recurse "$TPU:fedjax_ssl/runs" "${1-.}" "${place[@]}" \
    --worker=0
}

# A connection may break; what is computed is worth two more attempts.
fetch_or_keep() {
  local attempt
  for attempt in 1 2 3; do
    if fetch; then return; fi
    printf 'fetching failed, attempt %s of 3\n' "$attempt" >&2
    ((attempt == 3)) || sleep "$POLL"
  done
  delete_at_end=no
  hint "the results could not be fetched; the machine is kept, and costs:" \
    fetch delete
  return 1
}

delete() {
  do_it "${queue[@]}" delete "$TPU" "${place[@]}" --force --quiet
}

case "$command" in
  create | install | delete)
    [[ $# -eq 0 ]] || fail "$command takes no words, but got: $*"
    "$command" ;;
  wait)
    [[ $# -eq 0 ]] || fail "$command takes no words, but got: $*"
    wait_for_it ;;
  run)
    no_setting "$@"
    one_run "$@"
    run "$@" "${pod[@]}" ;;
  fetch)
    no_setting "$@"
    [[ $# -le 1 ]] || fail "fetch takes one folder, but got: $*"
    [[ $# -eq 0 || -n "$1" ]] || fail "fetch: the folder's name is empty."
    fetch "$@" ;;
  all)
    [[ -n "${1-}" ]] || fail "all needs the command to run."
    no_setting "$@"
    one_run "$@"
    if [[ "$dry_run" == yes ]]; then
      describe
    elif describe >/dev/null 2>&1; then
      fail "$TPU is there already, and all makes its own machine: use run and" \
        "fetch, or give another name by --tpu=."
    fi
    asking=yes
    create
    # From here on the machine is ours, and must not go on costing.
    asking=no delete_at_end=yes
    wait_for_it
    install
    code=0
    run "$@" "${pod[@]}" || code=$?
    fetch_or_keep || ((code)) || code=1
    exit "$code" ;;
  *) fail "$command is no command; --help lists them." ;;
esac
