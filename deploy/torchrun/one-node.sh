#!/usr/bin/env bash
# Run a site on one machine: a process for each GPU, NCCL between them (Gloo where there is no GPU).
# usage: one-node.sh FLEET.YAML SITE
#   NPROC=4            processes, instead of one for each GPU
#   TORCHRUN=torchrun  the launcher
set -euo pipefail
if [ $# -ne 2 ]; then sed -n '2,5p' "$0" >&2; exit 2; fi
fleet=$1
export FLEETDDP_NODE=$2

exec "${TORCHRUN:-torchrun}" \
  --standalone \
  --nproc-per-node "${NPROC:-auto}" \
  --max-restarts "${MAX_RESTARTS:-3}" \
  --module fleetddp.cloud.train "$fleet"
