"""The half of the bench that runs in the node's network, started by the other half.

Its progress goes to standard error, and its figures, one line of JSON, to standard output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import aiohttp
from tools.fleet.api import access, connect
from tools.fleet.operator_pod import OperatorPod
from tools.fleet.phases import Phases, Size
from tools.fleet.simulation import Simulation, open_network
from tools.fleet.watchers import Watchers


async def bench(size: Size, start_seconds: float, audit_log: Path) -> dict[str, Any]:
    """The figures of all phases, on the cluster of KUBECONFIG."""
    server, tls = access(Path(os.environ["KUBECONFIG"]))
    async with connect(server, tls) as api, aiohttp.ClientSession() as session:
        operator = OperatorPod(api, session, audit_log)
        await operator.find()
        watchers = Watchers(api)
        simulation = Simulation(api, pods=4 * size.count, start_seconds=start_seconds)
        watchers.listen(simulation.hear)
        phases = Phases(api, watchers, operator, size)
        async with asyncio.TaskGroup() as group:
            lasting = [group.create_task(part.run()) for part in (watchers, simulation)]
            await phases.run()
            for task in lasting:
                task.cancel()
    return {
        "count": size.count,
        "namespaces": size.namespaces,
        "pod start seconds": start_seconds,
        "cores": os.cpu_count(),
        "phases": phases.figures,
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser()
    for name in ("--count", "--namespaces", "--singles"):
        parser.add_argument(name, type=int, required=True)
    for name in ("--idle-seconds", "--start-seconds"):
        parser.add_argument(name, type=float, required=True)
    parser.add_argument("--audit-log", type=Path, required=True)
    options = parser.parse_args()
    size = Size(options.count, options.namespaces, options.idle_seconds, options.singles)
    open_network()
    figures = asyncio.run(bench(size, options.start_seconds, options.audit_log))
    json.dump(figures, sys.stdout)


if __name__ == "__main__":
    main()
