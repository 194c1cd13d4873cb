#!/usr/bin/env bash
# Run one machine of an elastic site: machines may come and go, between MIN_NODES and MAX_NODES. The same command on each.
# usage: elastic.sh FLEET.YAML SITE HEAD_HOST
#   HEAD_PORT=29400    where the machines meet; on the head, which is started first and stays
#   MIN_NODES=1 MAX_NODES=4
#   NPROC=8            processes on this machine, instead of one for each GPU
#   RDZV_CONF=last_call_timeout=30  how torchrun lets machines meet: here, seconds to wait for more once there are MIN_NODES
# The fleet file: site.checkpoint (a restart goes on from it), site.global_batch (the batch stays as it is), site.lr_scaling.
set -euo pipefail
if [ $# -ne 3 ]; then sed -n '2,8p' "$0" >&2; exit 2; fi
fleet=$1
export FLEETDDP_NODE=$2
# torchrun shares one store between rounds: a machine that comes in a later one looks in vain for its address (torch 2.13).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

exec "${TORCHRUN:-torchrun}" \
  --nnodes "${MIN_NODES:-1}:${MAX_NODES:-4}" \
  --rdzv-backend c10d \
  --rdzv-endpoint "$3:${HEAD_PORT:-29400}" \
  --rdzv-id "$FLEETDDP_NODE" \
  --rdzv-conf "${RDZV_CONF:-last_call_timeout=30}" \
  --max-restarts "${MAX_RESTARTS:-100}" \
  --nproc-per-node "${NPROC:-auto}" \
  --module fleetddp.cloud.train "$fleet"
