#!/usr/bin/env bash
# Build a wheel and use it as a stranger would: a clean virtual environment, outside the checkout, in a folder that has its own `common`.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/venv"
pip=("$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint deploy/constraints.txt)
"${pip[@]}" setuptools wheel build
# Built from a copy of what git knows, so that nothing untracked slips in and no build folder is left behind.
mkdir "$work/source"
git ls-files --cached --others --exclude-standard | tar --create --files-from=- --ignore-failed-read | tar --extract --directory="$work/source"
"$work/venv/bin/python" -m build --no-isolation --wheel --outdir "$work" "$work/source" >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }
"${pip[@]}" "$work"/fleetddp-*.whl

mkdir -p "$work/project/common" && cd "$work/project"
echo 'raise ImportError("the user'\''s own folder was imported")' >common/__init__.py
printf 'run: wheel\nmembers: {sites: [lab]}\n' >fleet.yaml
"$work/venv/bin/fleetddp" --help >/dev/null
"$work/venv/bin/fleetddp" check fleet.yaml
"$work/venv/bin/python" - <<'PY'
import fleetddp.cloud, fleetddp.common.aggregator, fleetddp.edge, fleetddp.protos.fleet_pb2
from fleetddp.cloud import FleetDDP
from fleetddp.edge import EdgeNode
print("wheel: ok:", FleetDDP.__name__, EdgeNode.__name__)
PY
