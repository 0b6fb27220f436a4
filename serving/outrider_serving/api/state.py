"""What one serving process is doing: the model, the settings and keys in force, whether it is ready.

Lives on the event loop: everything here is read and changed by one thread, except that metrics may be read
from any.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

from outrider_serving import logs
from outrider_serving.api.errors import not_ready
from outrider_serving.api.forms import Forms
from outrider_serving.api.keys import KeyRing
from outrider_serving.api.records import RequestRecord
from outrider_serving.api.shared_figures import shared_readers
from outrider_serving.api.text import TextEncoder
from outrider_serving.engine.options import DEFAULT_MAX_RUNNING, DEFAULT_MAX_WAITING
from outrider_serving.engine.process.child import Ending
from outrider_serving.engine.process.client import LOADING
from outrider_serving.engine.records import GraphCounts, PageCounts, StepRecord
from outrider_serving.engine.types import Delta, Request
from outrider_serving.settings import ModelState, PodSettings, PodState
from outrider_serving.suffix.lookup import HistorySize
from outrider_serving.suffix.shared.stats import LogStats
from outrider_serving.telemetry import Telemetry
from outrider_serving.tenancy import EVERYONE_APART, Tenancy

logger = logging.getLogger(__name__)

DRAINING = "the server is draining"


class Engine(Protocol):
    """What the API needs of an engine; `engine.process.client.EngineClient` is one."""

    @property
    def running(self) -> int:
        """Requests that take part in steps."""

    @property
    def waiting(self) -> int:
        """Requests that do not yet."""

    @property
    def unready(self) -> str | None:
        """Why requests are refused now, None while they are not."""

    @property
    def failure(self) -> str | None:
        """Why this process should be replaced as well, None while there is hope without it."""

    @property
    def proposer_trouble(self) -> str | None:
        """Why a proposer that the settings name is not loaded, None where all are."""

    @property
    def pages(self) -> PageCounts:
        """Pages of keys and values after the last step; none while there is no engine."""

    @property
    def kernels(self) -> str:
        """The compiled code that runs the target; empty where transformers' own modules do."""

    @property
    def graphs(self) -> GraphCounts:
        """Passes of the target in graphs after the last step; none while there is no engine."""

    @property
    def suffix_compiled(self) -> bool:
        """Whether the index of the suffix proposer is compiled code."""

    @property
    def history(self) -> HistorySize:
        """What is remembered of what requests have written, after the last step."""

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """What the steps add to a completion; closing the generator cancels the request."""

    def set_settings(self, settings: PodSettings) -> None:
        """Put changed settings in force."""


class Shared(Protocol):
    """What shares finished outputs; `sharing.Sharing` does."""

    @property
    def stats(self) -> LogStats | None:
        """Its figures; None where nothing is shared."""

    @property
    def trouble(self) -> str | None:
        """Why nothing is shared now, though it should be; see `PodState.shared_cache_error`."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model.

    Attributes:
        state: what is reported of it.
        engine: generates.
        encoder: turns text into its tokens.
        forms: checks the forms that its output is to have.
        identity: of weights and tokenizer; see `sharing.model_identity`.
        max_running, max_waiting: the engine's; see `EngineOptions`.
    """

    state: ModelState
    engine: Engine
    encoder: TextEncoder
    identity: str = ""
    forms: Forms = field(default_factory=Forms)
    max_running: int = DEFAULT_MAX_RUNNING
    max_waiting: int = DEFAULT_MAX_WAITING


class Serving:
    """The state of the process, and the one way in which each part of it changes."""

    def __init__(
        self,
        *,
        served_name: str,
        settings: PodSettings,
        keys: KeyRing | None = None,
        tenancy: Tenancy = EVERYONE_APART,
        shared: Shared | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        """Nothing is loaded.

        Args:
            served_name: of the model.
            settings: in force.
            keys: None where the API is open.
            tenancy: how tenants are told apart.
            shared: what shares finished outputs.
            address: where it listens, and
            port: at which port.
        """
        self.served_name = served_name
        self.settings = settings
        self.settings_error: str | None = None
        self.keys = keys
        self.keys_error: str | None = None
        self.tenancy = tenancy
        self.shared = shared
        self._shared_stats: LogStats | None = None
        self.draining = False
        self.expired = asyncio.Event()
        """Set at the end of the grace period: what still runs ends now, with an error."""
        self._loaded: ServedModel | None = None
        self.telemetry = Telemetry(
            address=address,
            port=port,
            readers={
                **shared_readers(lambda: self._shared_stats),
                "outrider.requests.running": lambda: self._loaded.engine.running if self._loaded else 0,
                "outrider.requests.waiting": lambda: self._loaded.engine.waiting if self._loaded else 0,
                "outrider.ready": lambda: self.unready is None,
                "outrider.settings.generation": lambda: self.settings.generation,
                "outrider.pages.total": lambda: self._pages.total,
                "outrider.pages.held": lambda: self._pages.held,
                "outrider.pages.cached": lambda: self._pages.cached,
                "outrider.target.compiled": lambda: bool(self._loaded and self._loaded.engine.kernels),
                "outrider.suffix.compiled": lambda: bool(
                    self._loaded and self._loaded.engine.suffix_compiled
                ),
                "outrider.history.tenants": lambda: self._history.tenants,
                "outrider.history.tokens": lambda: self._history.tokens,
                "outrider.history.size": lambda: self._history.bytes,
                "outrider.history.evicted": lambda: self._history.evicted,
                "outrider.target.graphs.captured": lambda: self._graphs.captured,
                "outrider.target.graphs.fallbacks": lambda: self._graphs.fallbacks,
            },
        )

    @property
    def model(self) -> ServedModel:
        """The model; ApiError (503) while it is loading, also again after its process died."""
        if self._loaded is None or self._loaded.engine.unready:
            raise not_ready(f"The server cannot answer now: {self._engine_unready}.")
        return self._loaded

    @property
    def failure(self) -> str | None:
        """Why only a new process would help, None while this one may."""
        return self._loaded.engine.failure if self._loaded else None

    @property
    def unready(self) -> str | None:
        """Why new requests should go elsewhere, None while they should not."""
        return DRAINING if self.draining else self._engine_unready

    @property
    def _engine_unready(self) -> str | None:
        return self._loaded.engine.unready if self._loaded else LOADING

    @property
    def _pages(self) -> PageCounts:
        return self._loaded.engine.pages if self._loaded else PageCounts()

    @property
    def _graphs(self) -> GraphCounts:
        return self._loaded.engine.graphs if self._loaded else GraphCounts()

    @property
    def _history(self) -> HistorySize:
        return self._loaded.engine.history if self._loaded else HistorySize()

    @property
    def pod_state(self) -> PodState:
        """What the admin port reports."""
        return PodState(
            ready=self.unready is None,
            generation=self.settings.generation,
            in_force=self.settings.in_force,
            settings_error=self.settings_error,
            keys_error=self.keys_error,
            proposer_error=self._loaded.engine.proposer_trouble if self._loaded else None,
            shared_cache_error=self.shared.trouble if self.shared else None,
            model=self._loaded.state if self._loaded else None,
        )

    def refresh(self) -> None:
        """Take the figures that metrics, read by another thread, cannot take by themselves."""
        self._shared_stats = self.shared.stats if self.shared else None

    def serve(self, model: ServedModel) -> None:
        """The model has generated its first token: answer requests."""
        model.engine.set_settings(self.settings)
        self._loaded = model
        logs.event(logger, "ready", model=self.served_name, revision=model.state.revision)

    def close(self) -> None:
        """Release everything; the engine is its owner's to close."""
        if self._loaded is not None:
            self._loaded.encoder.close()
            self._loaded.forms.close()
        self.telemetry.close()

    def drain(self) -> None:
        """Report as not ready from now on; requests are still answered."""
        self.draining = True

    def apply_settings(self, settings: PodSettings) -> None:
        """Put settings in force for the requests to come."""
        self.settings_error = None
        if settings == self.settings:
            return
        self.settings = settings
        if self._loaded is not None:
            self._loaded.engine.set_settings(settings)
        logs.event(logger, "settings in force", generation=settings.generation, arm=settings.in_force)

    def refuse_settings(self, reason: str) -> None:
        """Keep the settings in force, and report why newer ones were refused."""
        self.settings_error = reason
        logs.event(
            logger,
            "settings refused",
            logging.ERROR,
            reason=reason,
            generation_in_force=self.settings.generation,
        )

    def apply_keys(self, keys: KeyRing, refused: str | None = None) -> None:
        """Put keys in force for the requests to come, and report what of their files was refused."""
        if refused is None:
            self.keys_error = None
        else:
            self.refuse_keys(refused)
        if keys == self.keys:
            return
        self.keys = keys
        if keys.tenants:
            logs.event(logger, "keys in force", tenants=keys.tenants, keys=len(keys.digests))
        else:
            logs.event(logger, "there are no keys: every request is refused", logging.ERROR)

    def refuse_keys(self, reason: str) -> None:
        """Keep keys in force, and report why newer ones were refused."""
        if reason != self.keys_error:
            logs.event(logger, "keys refused", logging.ERROR, reason=reason)
        self.keys_error = reason

    def record_step(self, step: StepRecord) -> None:
        """Account for a step of the engine."""
        self.telemetry.record_step(step)

    def record_ending(self, ending: Ending) -> None:
        """Account for an engine's process that has ended and is to be replaced."""
        self.telemetry.record_restart(ending.reason)

    def record(self, record: RequestRecord) -> None:
        """Account for a request that has ended."""
        self.telemetry.record_request(record)
        logs.event(
            logger,
            "request",
            id=record.id,
            tenant=record.tenant,
            endpoint=record.labels.endpoint,
            workload=record.labels.workload,
            arm=record.labels.arm,
            generation=record.labels.generation,
            stream=record.stream,
            outcome=record.outcome,
            objective=record.verdict,
            error=record.error_type,
            prompt_tokens=record.usage.prompt_tokens,
            completion_tokens=record.usage.completion_tokens,
            verification_steps=record.usage.verification_steps,
            accepted_tokens=record.usage.accepted_tokens,
            duration=round(record.duration, 6),
            ttft=_rounded(record.ttft),
            tpot=_rounded(record.tpot),
            max_gap=_rounded(record.max_gap),
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
