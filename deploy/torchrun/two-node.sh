#!/usr/bin/env bash
# Run a site on two machines (NCCL): the same command on both, apart from the node's rank.
# usage: two-node.sh FLEET.YAML SITE NODE_RANK HEAD_HOST
#   HEAD_PORT=29400    where the head node (rank 0) gathers the others
#   NNODES=2           machines in the site
#   NPROC=8            processes on this machine, instead of one for each GPU
#   NCCL_SOCKET_IFNAME=eth0 (or GLOO_SOCKET_IFNAME): the network between the machines, if there are several
set -euo pipefail
if [ $# -ne 4 ]; then sed -n '2,7p' "$0" >&2; exit 2; fi
fleet=$1
export FLEETDDP_NODE=$2

exec "${TORCHRUN:-torchrun}" \
  --nnodes "${NNODES:-2}" \
  --node-rank "$3" \
  --master-addr "$4" \
  --master-port "${HEAD_PORT:-29400}" \
  --nproc-per-node "${NPROC:-auto}" \
  --module fleetddp.cloud.train "$fleet"
