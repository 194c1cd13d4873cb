"""The ``fleetddp`` command. Each command is thin: it reads its arguments, then imports what it runs (``--help`` must be quick).

Exit codes: 0 done; 1 the run failed; 2 a wrong argument or fleet file; 3 the coordinator cannot be reached; 130 Ctrl-C.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fleetddp.common.errors import ConfigError, FleetError, Unreachable

if TYPE_CHECKING:
    from fleetddp.common.config import FleetConfig

app = typer.Typer(
    name="fleetddp",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train one model over cloud GPU sites and a fleet of unreliable edge devices.",
    epilog="Begin with: fleetddp demo",
)

FleetFile = Annotated[Path, typer.Argument(metavar="FLEET.YAML", help="The fleet file.", show_default=False)]
Insecure = Annotated[bool, typer.Option("--insecure", help="Allow plaintext beyond loopback.")]
Track = Annotated[str, typer.Option(help="Which track's model, where the fleet has several.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


@app.command(epilog="Example: fleetddp coordinator fleet.yaml")
def coordinator(
    fleet: FleetFile,
    listen: Annotated[str, typer.Option(help="HOST:PORT to bind, instead of the fleet file's.", show_default=False)] = "",
    insecure: Insecure = False,
) -> None:
    """Run the coordinator: gather updates, merge them, publish versions."""
    from fleetddp.cloud.coordinator import Coordinator
    from fleetddp.common.telemetry import log_to_terminal

    log_to_terminal()
    Coordinator(_load(fleet, insecure=insecure, listen=listen)).run()


@app.command(epilog="Example: fleetddp region fleet.yaml --name west")
def region(
    fleet: FleetFile,
    name: Annotated[str, typer.Option(help="This region's id: its certificate's common name.", show_default=False)],
    listen: Annotated[str, typer.Option(help="HOST:PORT to bind, instead of the fleet file's.", show_default=False)] = "",
    insecure: Insecure = False,
) -> None:
    """Run a regional aggregator: gather its members' updates, send their sums to the coordinator, serve its versions."""
    from fleetddp.common.telemetry import log_to_terminal
    from fleetddp.edge.region import Region

    log_to_terminal()
    config = _load(fleet, insecure=insecure)
    if listen:
        config = config.model_copy(update={"region": config.region.model_copy(update={"listen": listen})})
    Region(config, name).run()


@app.command(epilog="Example: fleetddp edge fleet.yaml --name kitchen-pi")
def edge(
    fleet: FleetFile,
    name: Annotated[str, typer.Option(help="This node's id: its certificate's common name.", show_default=False)],
    track: Annotated[str, typer.Option(help="The track it takes part in, instead of edge.track.", show_default=False)] = "",
    insecure: Insecure = False,
) -> None:
    """Run an edge node: pull, train, push, until the run is finished."""
    from fleetddp.common.telemetry import log_to_terminal
    from fleetddp.edge.node import run_node

    log_to_terminal()
    run_node(_load(fleet, insecure=insecure), name=name, track=track)


@app.command(epilog="Example: fleetddp serve fleet.yaml --name cloud-1")
def serve(
    fleet: FleetFile,
    name: Annotated[str, typer.Option(help="This server's node id: its certificate's common name.", show_default=False)],
    listen: Annotated[str, typer.Option(help="HOST:PORT to bind, instead of the fleet file's.", show_default=False)] = "",
    track: Track = "",
    insecure: Insecure = False,
) -> None:
    """Answer with the fleet's model, each version as it is published, until SIGTERM."""
    from fleetddp.cloud.inference import run
    from fleetddp.common.task import load
    from fleetddp.common.telemetry import log_to_terminal

    log_to_terminal()
    config = _serving(_load(fleet, insecure=insecure), track, listen)
    assert config.task is not None
    run(config, load(config.task), name=name)


@app.command(epilog="Example: fleetddp export fleet.yaml --format onnx --out model.onnx")
def export(
    fleet: FleetFile,
    out: Annotated[Path, typer.Option(help="The file to write.", show_default=False)],
    format: Annotated[str, typer.Option(metavar="FORMAT", help="safetensors, pt2 (torch.export) or onnx.")] = "safetensors",
    version: Annotated[int, typer.Option(help="Its number; -1: the newest.")] = -1,
    track: Track = "",
    name: Annotated[str, typer.Option(help="My node id: my certificate's common name.")] = "export",
    journal: Annotated[bool, typer.Option("--journal", help="Read the journal here, when the coordinator has ended.")] = False,
    insecure: Insecure = False,
) -> None:
    """Write a version as a file for devices, checked against the model."""
    from fleetddp.cloud.export import export_version

    config = _serving(_load(fleet, insecure=insecure), track)
    done = export_version(config, format, out, version=version, node=name, from_journal=journal)
    typer.echo(
        f"{done.path}: version {done.version}, {done.bytes} bytes; largest difference from the model {done.difference:.2g}"
    )


@app.command(epilog="Example: fleetddp status 127.0.0.1:7070 --watch")
def status(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="A coordinator's or region's address.", show_default=False)],
    json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again every second until Ctrl-C.")] = False,
    ca: Annotated[Path | None, typer.Option(help="Mutual TLS: the CA's certificate.", show_default=False)] = None,
    cert: Annotated[Path | None, typer.Option(help="Mutual TLS: my certificate.", show_default=False)] = None,
    key: Annotated[Path | None, typer.Option(help="Mutual TLS: my key.", show_default=False)] = None,
    insecure: Insecure = False,
) -> None:
    """Show a run: members, versions and why the window is still open; of each of its tracks."""
    from fleetddp.cloud.status import show
    from fleetddp.common.config import parse

    security = {"ca": ca, "cert": cert, "key": key, "insecure": insecure}
    show(address.removeprefix("grpc://"), parse({"security": security}, source="options").security, as_json=json, watch=watch)


@app.command(epilog="Example: fleetddp check fleet.yaml")
def check(fleet: FleetFile, json: Json = False) -> None:
    """Validate a fleet file and print it with every default filled in."""
    import yaml

    from fleetddp.common.outer import OuterOptimizer

    config = _load(fleet)
    for track in config.tracks or [""]:
        OuterOptimizer(config.for_track(track).outer)
    typer.echo(config.model_dump_json(indent=2) if json else yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


@app.command(epilog="Example: fleetddp demo --out runs/demo")
def demo(
    out: Annotated[Path, typer.Option(help="Where the summary and the page go.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the partition and the training.")] = 0,
) -> None:
    """Run a whole fleet on this machine: a coordinator, a two-rank site and six edge nodes, on real handwriting."""
    from fleetddp.cloud.demo import run_demo

    raise typer.Exit(run_demo(out, seed=seed))


@app.command(epilog="Example: fleetddp simulate scenario.yaml --compare sync,semi_sync --out runs/simulation")
def simulate(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO.YAML", help="The scenario file.", show_default=False)],
    compare: Annotated[
        str, typer.Option(metavar="NAME,NAME", help="Policies: of the scenario, or presets such as sync.", show_default=False)
    ] = "",
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for events, summary and page.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Run a whole fleet in virtual time, under one policy or several."""
    from fleetddp.edge.sim import preload
    from fleetddp.edge.sim.scenario import load

    loaded = load(scenario)
    if loaded.mode == "train" and loaded.trainer.workers != 0:
        task = loaded.fleet.task  # what the workers need is imported while we import the same
        preload.start(*([task.target.split(":")[0]] if task is not None else ()))
    from fleetddp.cloud.simulate import simulate

    names = [name.strip() for name in compare.split(",") if name.strip()]
    simulate(loaded, scenario, compare=names, seed=seed, out=out, as_json=json)


def _load(path: Path, *, insecure: bool = False, listen: str = "") -> FleetConfig:
    """The fleet file with the command line's changes."""
    from fleetddp.common.config import load

    config = load(path)
    if insecure:
        security = config.security.model_validate({**config.security.model_dump(), "insecure": True})
        config = config.model_copy(update={"security": security})
    if listen:
        config = config.model_copy(update={"coordinator": config.coordinator.model_copy(update={"listen": listen})})
    return config


def _serving(config: FleetConfig, track: str, listen: str = "") -> FleetConfig:
    """The fleet file as the track whose model is asked for sees it, with the command line's changes."""
    changes = {key: value for key, value in (("track", track), ("listen", listen)) if value}
    config = config.model_copy(update={"serve": config.serve.model_copy(update=changes)})
    config = config.for_track(config.serve.track)
    if config.task is None:
        raise ConfigError("task: there is no model without a Task; give task.target in the fleet file")
    return config


def main() -> None:
    """Entry point: turns our errors into one line and an exit code."""
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        sys.exit(130)
    except FleetError as error:
        typer.echo(f"fleetddp: {error}", err=True)
        sys.exit(2 if isinstance(error, ConfigError) else 3 if isinstance(error, Unreachable) else 1)


if __name__ == "__main__":
    main()
