"""A root and its regions as real processes, with members that roam between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleetddp.common.config import SecurityConfig
from fleetddp.common.publish import save_init
from fleetddp.common.transport.uplink import Uplink
from helpers.fleet import fleet_config, free_port, on_port, write
from helpers.marks import Flat
from helpers.members import Moments, RoamingMember
from helpers.preloaded import Child, Preloaded

REGIONS = ("west", "east")
MEMBERS = 6


class Tree:
    """A root and two regions, each on a port that outlives the process; started and killed by name."""

    def __init__(self, folder: Path, preloaded: Preloaded, **sections: Any) -> None:
        self._folder, self._preloaded = folder, preloaded
        save_init(Flat(), folder / "init.safetensors")
        self.config = on_port(
            fleet_config(
                folder,
                start={"bootstrap": "file", "file": str(folder / "init.safetensors")},
                coordinator={"keep_versions": 1_000_000},
                members={"heartbeat_s": 0.3, "lease_s": 2.0},
                merge={"staleness": {"max_staleness": 1000, "discount": {"kind": "constant"}}},
                **{"window": {"preset": "fedbuff", "quorum": MEMBERS, "grace_s": None, "deadline_s": 1.0}, **sections},
            ),
            free_port(),
        )
        self.addresses = {name: f"127.0.0.1:{free_port()}" for name in REGIONS}
        self.root = self._start("coordinator", config=write(self.config, folder))
        self.regions: dict[str, Child] = {}
        for name in REGIONS:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a region, or start it again on its journal."""
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        own = {"address": self.addresses[name], "journal": str(folder / "journal"), "keep_versions": 100}
        config = self.config.model_validate({**self.config.model_dump(exclude_unset=True), "region": own})
        self.regions[name] = self._start("region", config=write(config, folder), name=name)

    def _start(self, role: str, **arguments: str) -> Child:
        child = self._preloaded.start(role, self._folder / f"{arguments.get('name', role)}.log", **arguments)
        child.wait_for("listening")
        return child

    def parents(self, index: int) -> list[str]:
        """Of a member: its own region, the other one, the root."""
        first = REGIONS[index % 2]
        return [self.addresses[first], *(a for name, a in self.addresses.items() if name != first), self.root_address]

    @property
    def root_address(self) -> str:
        return self.config.coordinator.address

    def status(self, address: str) -> dict[str, Any]:
        uplink = Uplink(address, SecurityConfig(), node="onlooker")
        try:
            return uplink.status()
        finally:
            uplink.close()

    def drained(self, name: str) -> bool:
        """Whether a region has nothing more to deliver or to ask."""
        with contextlib.suppress(Exception):
            parent = self.status(self.addresses[name])["parent"]
            return parent["partials"] == parent["asked"] == 0
        return False


@contextlib.contextmanager
def members(tree: Tree, moments: Moments, seed: int) -> Iterator[list[RoamingMember]]:
    fleet = [RoamingMember(index, tree.parents(index), moments, seed=seed) for index in range(MEMBERS)]
    for member in fleet:
        member.start()
    try:
        yield fleet
    finally:
        for member in fleet:
            member.close()
