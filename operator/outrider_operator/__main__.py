"""The operator's process: flags or environment, logs, the workers, and kopf."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from typing import Final

import httpx
import kopf

from outrider_operator import names
from outrider_operator.client import Client, load_client
from outrider_operator.config import OperatorConfig
from outrider_operator.handlers import registry
from outrider_operator.podspec import PullPolicy
from outrider_operator.reconcile import Reconciler
from outrider_operator.workqueue import WorkQueue

WORKERS: Final = 4


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Flags; each may also be given as OUTRIDER_<FLAG> in the environment, and is checked all the same."""
    parser = argparse.ArgumentParser(prog="outrider-operator", description="Operate SpeculativeModels.")

    from_environment: list[str] = []

    def add(flag: str, default: str | None, text: str, **more: object) -> None:
        variable = "OUTRIDER_" + flag.lstrip("-").replace("-", "_").upper()
        if variable in os.environ:
            from_environment.append(f"{flag}={os.environ[variable]}")
        parser.add_argument(flag, default=default, help=f"{text} [{variable}]", **more)  # type: ignore[arg-type]

    add("--serving-image", None, "image of serving pods whose SpeculativeModel names none")
    add(
        "--image-pull-policy",
        "IfNotPresent",
        "pull policy of serving pods whose SpeculativeModel names none",
        choices=list(PullPolicy),
        type=PullPolicy,
    )
    add("--namespaces", "", "comma-separated namespaces to serve; empty for the whole cluster")
    add("--resync-seconds", "30", "how often a settled resource is looked at", type=_seconds)
    add("--progress-seconds", "2.5", "how often a resource in progress is looked at", type=_seconds)
    add(
        "--liveness",
        "http://0.0.0.0:8080/healthz",
        "where the operator answers that it lives; empty for nowhere",
    )
    add("--log-format", "json", "one JSON object a line, or text", choices=["json", "text"])
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args([*from_environment, *given])
    if not options.serving_image:
        parser.error("--serving-image is needed (or OUTRIDER_SERVING_IMAGE)")
    return options


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: seconds must lie between 0.1 and 3600")
    return value


def config_of(options: argparse.Namespace) -> OperatorConfig:
    """The operator's settings from its flags."""
    return OperatorConfig(
        serving_image=options.serving_image,
        image_pull_policy=options.image_pull_policy,
        namespaces=tuple(name.strip() for name in options.namespaces.split(",") if name.strip()),
        resync_seconds=options.resync_seconds,
        progress_seconds=options.progress_seconds,
    )


async def operate(config: OperatorConfig, liveness: str | None, *, stop: asyncio.Event | None = None) -> None:
    """Run until SIGTERM, SIGINT or the stop event."""
    client = Client(await asyncio.to_thread(load_client))
    if not await client.serves(names.KIND):
        raise SystemExit(f"the API server does not know {names.KIND}: install the chart's CRD (crds.install)")
    async with httpx.AsyncClient(trust_env=False, follow_redirects=False) as admin:
        queue = WorkQueue(Reconciler(client, admin, config).reconcile)
        workers = asyncio.create_task(queue.run(WORKERS))
        watching = asyncio.create_task(
            kopf.operator(
                registry=registry(queue.add),
                standalone=True,
                clusterwide=not config.namespaces,
                namespaces=config.namespaces,
                liveness_endpoint=liveness,
                stop_flag=stop,
            )
        )
        try:
            await asyncio.wait((workers, watching), return_when=asyncio.FIRST_COMPLETED)
            for task in (workers, watching):
                if task.done():
                    task.result()  # whichever ended by an error takes the process with it
        finally:
            for task in (workers, watching):
                task.cancel()
            await asyncio.gather(workers, watching, return_exceptions=True)


def configure_logs(log_format: str) -> None:
    """Log in that format, without the lines for every event and every request, also those of probes."""
    kopf.configure(log_format=kopf.LogFormat.JSON if log_format == "json" else kopf.LogFormat.FULL)
    for noisy in ("kopf.objects", "httpx", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the image and of `outrider-operator`."""
    options = parse(arguments)
    configure_logs(options.log_format)
    asyncio.run(operate(config_of(options), options.liveness or None))
    return 0


if __name__ == "__main__":
    sys.exit(main())
