"""The commands, as the Makefile calls them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from outrider_local import environment, gobuild, node, preflight, privileges, up
from outrider_local.report import EXIT_USAGE, ProblemError, complain, detail, say, step
from outrider_local.settings import KNOBS, Settings, from_environment


def _up(settings: Settings, _: argparse.Namespace) -> None:
    up.up(settings)


def _down(settings: Settings, _: argparse.Namespace) -> None:
    if not settings.state.exists():
        say(f"node {settings.name} does not run: nothing to do")
        return
    step(f"ending node {settings.name} and removing {settings.state}")
    if privileges.is_root():
        node.down(settings)
    else:
        detail("sudo is needed: the node's processes and cgroups are root's")
        privileges.rerun(settings, ["node", "down"])


def _preflight(settings: Settings, _: argparse.Namespace) -> None:
    step("checking this machine")
    preflight.run(settings)


def _ready(settings: Settings, _: argparse.Namespace) -> None:
    preflight.run(settings, with_ports=False)
    environment.make(settings)
    gobuild.build(settings.checkout, settings.cache)


def _env(settings: Settings, _: argparse.Namespace) -> None:
    environment.make(settings)


def _build(settings: Settings, _: argparse.Namespace) -> None:
    gobuild.build(settings.checkout, settings.cache)


def _which(settings: Settings, options: argparse.Namespace) -> None:
    if options.program == "uv":
        say(str(environment.uv(settings.cache)))
    else:
        say(str(gobuild.programs(settings.checkout, settings.cache).path(options.program)))


def _node_up(settings: Settings, _: argparse.Namespace) -> None:
    if not node.up(settings):
        say(f"node {settings.name} already runs")


def _node_down(settings: Settings, _: argparse.Namespace) -> None:
    node.down(settings)


def _node_forward(settings: Settings, options: argparse.Namespace) -> None:
    listen = options.listen or settings.port
    node.forward_port(settings, options.label, listen, options.address, options.port)


def _node_exec(settings: Settings, options: argparse.Namespace) -> None:
    words = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not words:
        raise ProblemError("no command is given", "node exec [--network] COMMAND ...", EXIT_USAGE)
    command = node.inside(settings, words, network_only=options.network)
    os.execv(command[0], command)


def _node_import(settings: Settings, options: argparse.Namespace) -> None:
    node.import_image(settings, options.archive)


def _node_images(settings: Settings, _: argparse.Namespace) -> None:
    say("\n".join(sorted(node.images(settings))))


def _parser() -> argparse.ArgumentParser:
    knobs = "\n".join(f"  {name:18} {text}" for name, text in KNOBS.items())
    parser = argparse.ArgumentParser(
        prog="outrider_local",
        description="Outrider on one machine: a real one-node cluster and the model on it.",
        epilog=f"environment variables:\n{knobs}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--name", help="name of the node (OUTRIDER_NAME)")
    commands = parser.add_subparsers(dest="command_name", metavar="COMMAND", required=True)

    def add(
        group: argparse._SubParsersAction[argparse.ArgumentParser],
        name: str,
        text: str,
        function: Callable[[Settings, argparse.Namespace], None],
        root: bool = False,
    ) -> argparse.ArgumentParser:
        command = group.add_parser(name, help=text, description=text)
        command.set_defaults(function=function, root=root)
        return command

    add(commands, "up", "everything, to the first tokens", _up)
    add(commands, "down", "end what up started, and only that", _down)
    add(commands, "preflight", "check this machine and install missing system packages", _preflight)
    add(commands, "ready", "all that tests need: system packages, .venv, built programs", _ready)
    add(commands, "env", "make .venv from the lock", _env)
    add(commands, "build", "build the cluster's Go programs", _build)
    add(commands, "which", "print the path of a built program, or of uv", _which).add_argument("program")
    inner = commands.add_parser("node", help="the node alone").add_subparsers(
        metavar="COMMAND", required=True
    )
    add(inner, "up", "start the node", _node_up, root=True)
    add(inner, "down", "end the node", _node_down, root=True)
    add(inner, "images", "list the node's images", _node_images, root=True)
    add(inner, "import", "give the node an image", _node_import, root=True).add_argument("archive", type=Path)
    service = add(
        inner, "forward", "forward a loopback port to an address in the cluster", _node_forward, root=True
    )
    service.add_argument(
        "--label", default=node.SERVICE_FORWARD, help="one forward a label: a new one replaces it"
    )
    service.add_argument("--listen", type=int, help="the loopback port (OUTRIDER_PORT)")
    service.add_argument("address")
    service.add_argument("port", type=int)
    execute = add(inner, "exec", "run a command in the node", _node_exec, root=True)
    execute.add_argument(
        "--network", action="store_true", help="only its network: mounts and processes are the machine's"
    )
    execute.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status tells how it went."""
    words = sys.argv[1:] if arguments is None else arguments
    # What the node makes is read by its containers' users, and its records by who asked sudo; secrets are
    # closed one by one.
    os.umask(0o022)
    options = _parser().parse_args(words)
    try:
        settings = from_environment(os.environ, options.name)
        if options.root and not privileges.is_root():
            privileges.rerun(settings, words)
        else:
            options.function(settings, options)
    except ProblemError as problem:
        complain(problem)
        return problem.exit_code
    except KeyboardInterrupt:
        return 130
    return 0
