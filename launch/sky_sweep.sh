#!/usr/bin/env bash
# A sweep as managed spot jobs of SkyPilot, one for each part of the grid.
#
#   launch/sky_sweep.sh [--dry_run] GRID JOBS BUCKET [OPTION...]
#
# GRID is a grid file of launch/sweep.py inside this repository, JOBS how many
# machines share it, BUCKET the name of a bucket for the results. Options go to
# `sky jobs launch`, as in --infra=gcp/us-west4. A job that loses its machine gets
# another one and goes on where it was.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { printf 'error: %s\n' "$*" >&2; exit 2; }
usage() { sed -n '2,/^set /s/^# \{0,1\}//p' launch/sky_sweep.sh; }

case "${1-}" in --help|-h) usage; exit 0 ;; esac
dry_run=no
if [[ "${1-}" == --dry_run ]]; then
  dry_run=yes
  shift
fi
[[ $# -ge 3 ]] || fail "usage: launch/sky_sweep.sh [--dry_run] GRID JOBS" \
  "BUCKET [OPTION...]"
grid="$1" jobs="$2" bucket="$3"
shift 3
[[ -f "$grid" && "$grid" != /* && "/$grid/" != */../* ]] \
  || fail "GRID=$grid must be a file in the repository, named from its root."
[[ "$jobs" =~ ^[1-9][0-9]{0,2}$ ]] || fail "JOBS=$jobs must be from 1 to 999."
[[ "$bucket" =~ ^[a-z0-9][a-z0-9._-]+$ ]] || fail "BUCKET=$bucket is no name."
for word in "$@"; do
  [[ "$word" != --dry_run ]] || fail "--dry_run goes before GRID."
done
[[ "$dry_run" == yes ]] || command -v sky >/dev/null \
  || fail "there is no program sky; install SkyPilot, or give --dry_run."

for ((i = 0; i < jobs; i++)); do
  words=(sky jobs launch --yes --detach-run --use-spot
    "--name=fedjax-ssl-$i" "--env=GRID=$grid" "--env=SHARD=$i/$jobs"
    "--env=BUCKET=$bucket" "$@" launch/skypilot.yaml)
  if [[ "$dry_run" == yes ]]; then
    printf '%q ' "${words[@]}"
    printf '\n'
  else
    # Started twice, a part would be run by two machines at once.
    "${words[@]}" || fail "job $i was not started, the $i before it were: end" \
      "them by sky jobs cancel, or start the other $((jobs - i)) by hand as" \
      "--dry_run prints them."
  fi
done
