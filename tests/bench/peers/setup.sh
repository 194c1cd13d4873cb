#!/usr/bin/env bash
# The peers of sim_training.py and diloco.py, each in an environment of its own: tests/bench/peers/setup.sh [DIRECTORY] (about 4 GB).
set -euo pipefail
directory=${1:-"$(dirname "$0")"}
torch=${TORCH:-torch==2.13.0}  # the same for all arms; installed first, so that no other build comes with a peer

install() { # NAME PACKAGE
  "${PYTHON:-python3}" -m venv "$directory/.venv-$1"
  "$directory/.venv-$1/bin/pip" install --quiet --disable-pip-version-check "$torch" numpy
  "$directory/.venv-$1/bin/pip" install --quiet --disable-pip-version-check "$2"
}

install pfl "pfl==0.6.0"
install flwr "flwr[simulation]==1.42.0"
install torchft "torchft==0.2.0"
