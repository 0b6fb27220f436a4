"""The operator's command line: flags or environment, and logs. What it then does is in `process`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import kopf

from outrider_operator.config import OperatorConfig
from outrider_operator.elector import LeaseLostError
from outrider_operator.lease import SHORTEST_SECONDS
from outrider_operator.podspec import PullPolicy
from outrider_operator.process import Process, Standing

logger = logging.getLogger(__name__)

_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


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
        "--listen",
        "0.0.0.0:8080",
        "address and port of /healthz and /metrics; empty for none",
        type=_address,
    )
    add("--pod-namespace", None, "namespace of the operator's pod and of its Lease")
    add("--pod-name", None, "name of the operator's pod, by which it holds its Lease")
    add("--lease-name", "outrider-operator", "Lease that one operator of several holds while it works")
    add("--lease-seconds", "15", "how long the Lease lasts without renewal", type=_lease_seconds)
    add(
        "--network-policies",
        "true",
        "whether serving pods get a NetworkPolicy",
        choices=[True, False],
        type=_flag,
    )
    add("--monitoring-namespaces", "", "comma-separated namespaces that may read the metrics of serving pods")
    add("--log-format", "json", "one JSON object a line, or text", choices=["json", "text"])
    given = sys.argv[1:] if arguments is None else arguments
    options = parser.parse_args([*from_environment, *given])
    if not options.serving_image:
        parser.error("--serving-image is needed (or OUTRIDER_SERVING_IMAGE)")
    return options


def _seconds(text: str, least: float = 0.1) -> float:
    value = float(text)
    if not least <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: seconds must lie between {least:g} and 3600")
    return value


def _lease_seconds(text: str) -> float:
    return _seconds(text, SHORTEST_SECONDS)


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text}: must be true or false")
    return text == "true"


def _address(text: str) -> tuple[str, int] | None:
    if not text:
        return None
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise argparse.ArgumentTypeError(f"{text}: must be HOST:PORT, such as 0.0.0.0:8080")
    return host.strip("[]"), int(port)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def config_of(options: argparse.Namespace) -> OperatorConfig:
    """The operator's settings from its flags."""
    return OperatorConfig(
        serving_image=options.serving_image,
        image_pull_policy=options.image_pull_policy,
        namespaces=_names(options.namespaces),
        pod_namespace=options.pod_namespace or own_namespace(),
        network_policies=options.network_policies,
        monitoring_namespaces=_names(options.monitoring_namespaces),
        resync_seconds=options.resync_seconds,
        progress_seconds=options.progress_seconds,
    )


def own_namespace() -> str:
    """The namespace of the pod's service account; outside a cluster `default`."""
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "default"


def identity_of(options: argparse.Namespace) -> str:
    """Who holds the Lease: the pod, of whose containers one at most runs, or else this very process."""
    return options.pod_name or f"{socket.gethostname()}_{os.getpid()}_{secrets.token_hex(4)}"


def configure_logs(log_format: str) -> None:
    """Log in that format, without the lines for every event and every request."""
    kopf.configure(log_format=kopf.LogFormat.JSON if log_format == "json" else kopf.LogFormat.FULL)
    for noisy in ("kopf.objects", "httpx"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_retries_are_no_errors)


def _retries_are_no_errors(record: logging.LogRecord) -> bool:
    """A request that kopf will send again, as it says itself, is at most worth a warning."""
    if record.levelno == logging.ERROR and "will retry" in record.getMessage():
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    return True


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Entry point of the image and of `outrider-operator`."""
    options = parse(arguments)
    configure_logs(options.log_format)
    standing = Standing(identity_of(options), options.lease_name, options.lease_seconds, options.listen)
    asyncio.run(_run(config_of(options), standing))
    end_at_once(0)


async def _run(config: OperatorConfig, standing: Standing) -> None:
    await Process(config, standing, abandon).run()


def abandon(error: LeaseLostError) -> NoReturn:
    """End because the Lease is lost."""
    logger.critical("%s: ending, so that another operator can take over", error)
    end_at_once(1)


def end_at_once(code: int) -> NoReturn:
    """End without waiting for threads: one may hang in a request, longer than Lease and grace period last."""
    logging.shutdown()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
