"""A throw-away CA made by ``deploy/certs.sh``."""

from __future__ import annotations

import subprocess
from pathlib import Path

from fleetddp.common.config import SecurityConfig

SCRIPT = Path(__file__).parents[2] / "deploy" / "certs.sh"


def certs(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run certs.sh."""
    return subprocess.run([SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False)


def make_ca(directory: Path, *nodes: str, hosts: tuple[str, ...] = ("localhost", "127.0.0.1"), server: str = "") -> Path:
    """A CA in ``directory``, a coordinator's certificate, one for each node, and one for the node ``server``, at ``hosts``."""
    made = [("ca", ()), ("coordinator", hosts), ("node", nodes), *([("server", (server, *hosts))] if server else [])]
    for command, names in made:
        result = certs(command, directory, *names)
        assert result.returncode == 0, result.stderr
    return directory


def security(directory: Path, name: str) -> SecurityConfig:
    """What ``name`` (a node, or ``coordinator``) puts into its fleet file."""
    return SecurityConfig(ca=directory / "ca.pem", cert=directory / f"{name}.pem", key=directory / f"{name}.key")
