#!/usr/bin/env bash
# Generates the committed stubs in protos/ from protos/*.proto, in a throw-away virtual environment.
#   deploy/protos.sh            write NAME_pb2.py, NAME_pb2_grpc.py and NAME_pb2.pyi for each protos/NAME.proto
#   deploy/protos.sh --check    generate beside them and compare; exit 1 if a committed one differs
# grpcio-tools 1.71.2 writes gencode for protobuf 5.29, which every protobuf >=5.29,<8 runs; flwr needs that range.
# PROTOC_PYTHON names a Python that has that grpcio-tools already; then nothing is installed.
set -euo pipefail

TOOLS_VERSION=1.71.2
STUBS=({fleet,inference}_pb2.py {fleet,inference}_pb2_grpc.py {fleet,inference}_pb2.pyi)

case "${1:-}" in
  "" | --check) mode="${1:-}" ;;
  *)
    echo "usage: deploy/protos.sh [--check]" >&2
    exit 2
    ;;
esac

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

python="${PROTOC_PYTHON:-}"
if [[ -z "$python" ]]; then
  "${PYTHON:-python3}" -m venv "$work/venv"
  python="$work/venv/bin/python"
  # grpcio-tools imports pkg_resources, which newer setuptools no longer have.
  "$python" -m pip install --quiet --disable-pip-version-check \
    "grpcio-tools==$TOOLS_VERSION" "protobuf>=5.29,<6" "setuptools<81"
fi

# The folder is laid out as the package, so that the generated import reads `from fleetddp.protos import fleet_pb2`.
mkdir -p "$work/src/fleetddp/protos" "$work/out"
cp "$root"/protos/*.proto "$work/src/fleetddp/protos/"
"$python" -m grpc_tools.protoc -I "$work/src" \
  --python_out="$work/out" --pyi_out="$work/out" --grpc_python_out="$work/out" \
  "$work"/src/fleetddp/protos/*.proto

for stub in "${STUBS[@]}"; do
  if [[ -z "$mode" ]]; then
    install -m 644 "$work/out/fleetddp/protos/$stub" "$root/protos/$stub"
  elif ! diff -u "$root/protos/$stub" "$work/out/fleetddp/protos/$stub"; then
    echo "protos/$stub does not match its .proto: run deploy/protos.sh and commit the result" >&2
    exit 1
  fi
done
