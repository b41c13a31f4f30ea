"""`phalanx serve`: the API process, from the socket to the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn
import uvloop
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

if TYPE_CHECKING:
    from phalanx.server.app import Cockpit
    from phalanx.server.grammar.compiler import GrammarCompiler
    from phalanx.server.service import Service

from phalanx.doctor.preflight import preflight
from phalanx.errors import ConfigError, EngineDeadError
from phalanx.runtime.config import EngineConfig
from phalanx.server.access_log import AccessLog
from phalanx.server.announce import announcement, url_of
from phalanx.server.arrivals import HttpServer
from phalanx.server.door import Door, room_for_connections
from phalanx.server.engine_client import ENGINE_MODULE, EngineLaunch
from phalanx.server.errors import ApiError
from phalanx.server.guard import MAX_COCKPIT_BODY, PROBE_PATHS, Guard
from phalanx.server.http import protocol
from phalanx.server.keys import KeyRing
from phalanx.server.listen import listen
from phalanx.server.logs import set_up_logs
from phalanx.server.messages import Started
from phalanx.server.metrics import Metrics
from phalanx.server.options import ServeOptions, default_name
from phalanx.server.preparer import Preparer
from phalanx.server.reload import reload
from phalanx.server.supervisor import Supervisor
from phalanx.server.tls import tls_context

log = logging.getLogger("phalanx.server")

_SHUTDOWN_MARGIN_S = 5
_LATEST_END_S = 15
_LOADING_TOLD_EVERY_S = 3.0
_ADMIN_CONNECTIONS = 64


def serve(
    config: EngineConfig,
    options: ServeOptions,
    engine_module: str = ENGINE_MODULE,
    cockpit: Callable[[Service], Cockpit] | None = None,
) -> int:
    """Serve until told to stop. Returns the exit code: 0 after SIGTERM or Ctrl-C, 1 when the engine has died."""
    set_up_logs(options.log_format)
    tls = tls_context(options)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(options.host, options.port))
        admin = None
        if options.admin_port is not None:
            admin = stack.enter_context(listen(options.admin_host or options.host, options.admin_port))
        runner = stack.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        return runner.run(ApiServer(config, options, engine_module, cockpit, tls).run(listener, admin))


class ApiServer:
    """Ties the HTTP server, the supervisor and the process's signals together."""

    def __init__(
        self,
        config: EngineConfig,
        options: ServeOptions,
        engine_module: str,
        make_cockpit: Callable[[Service], Cockpit] | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._tls = tls
        self._door = Door(room_for_connections())
        self._config = config
        self._options = options
        self._name = options.served_names[0] if options.served_names else default_name(config.model)
        self._metrics = Metrics(self._name, options.vllm_metrics)
        launch = EngineLaunch(config, options.step_timeout_s, engine_module)
        heard = self._metrics.stepped, self._metrics.engine_restarts
        self._supervisor = Supervisor(launch, options.restarts, options.max_queued_requests, *heard)
        self._preparer = Preparer()
        self._make_cockpit = make_cockpit
        self._service: Service | None = None
        self._cockpit: Cockpit | None = None
        self._http: HttpServer | None = None

    async def run(self, listener: socket.socket, admin: socket.socket | None = None) -> int:
        """The engine process starts first: while it loads, this one looks at the machine and gets ready."""
        self._address = listener.getsockname()[:2]
        self._admin_address = admin.getsockname()[:2] if admin is not None else None
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        self._preparer.spawn()
        warmed: asyncio.Future[None] = loop.create_future()
        supervising = asyncio.create_task(self._supervisor.run(self._engine_started, warmed))
        beside = [asyncio.create_task(self._tell_loading())]
        try:
            _, config = await asyncio.gather(
                asyncio.to_thread(preflight, self._config.tp, self._config.device),
                asyncio.to_thread(self._http_config),
            )
            assert self._service is not None
            await self._preparer.start(self._service.assignment)
            beside.append(asyncio.create_task(self._warm_grammars(self._service.grammars, warmed)))
            self._http = HttpServer(config, self._door, self._tls)
            if admin is not None:
                door = Door(_ADMIN_CONNECTIONS)
                probing = HttpServer(self._admin_config(self._service, door), door)
                beside.append(asyncio.create_task(probing.serve(sockets=[admin])))
            if self._cockpit is not None:
                beside.append(asyncio.create_task(self._cockpit.run()))
            leave_to_stay()
            return await self._serve(listener, supervising)
        finally:
            for task in beside:
                task.cancel()
            supervising.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await supervising
            if self._service is not None:
                await self._service.grammars.close()
                if self._service.traces is not None:
                    await asyncio.to_thread(self._service.traces.close)
            await self._preparer.close()

    async def _warm_grammars(self, grammars: GrammarCompiler, warmed: asyncio.Future[None]) -> None:
        """So that the first answer of a given form is as quick as the second."""
        try:
            if self._config.warm_up != "off":
                await grammars.start()
        except ConfigError as error:
            log.warning("answers of a given form cannot be had: %s", error)
        finally:
            warmed.set_result(None)

    async def _serve(self, listener: socket.socket, supervising: asyncio.Task[EngineDeadError]) -> int:
        assert self._http is not None
        self._http.should_exit = self._supervisor.state == "draining"
        serving = asyncio.create_task(self._http.serve(sockets=[listener]))
        self._announce()
        await asyncio.wait({serving, supervising}, return_when=asyncio.FIRST_COMPLETED)
        if not supervising.done():
            log.info("stopped")
            return 0
        self._http.should_exit = True
        await serving
        death = supervising.result()
        log.error("%s: %s", death.code, death)
        return 1

    def _http_config(self) -> uvicorn.Config:
        """Imports what takes long, and the tokenizer."""
        from phalanx.server.app import create_app
        from phalanx.server.service import build_service

        options = self._options
        self._service = build_service(
            self._name, self._config, options, self._supervisor, self._metrics, self._preparer
        )
        if self._make_cockpit is not None:
            self._cockpit = self._make_cockpit(self._service)
        hosts = {options.host, *options.allowed_hosts}
        open_paths = PROBE_PATHS if options.open_probes else ()
        routes = create_app(self._service, self._cockpit)
        app: ASGIApp = AccessLog(Guard(routes, options.keys, options.max_body_bytes, hosts, open_paths))
        if options.cors_origins:
            app = CORSMiddleware(app, list(options.cors_origins), allow_methods=["GET", "POST"], allow_headers=["*"])
        config = self._uvicorn(app, self._door)
        config.load()
        return config

    def _admin_config(self, service: Service, door: Door) -> uvicorn.Config:
        """Nobody who asks needs a key, or a certificate; there is nothing to read but probes and metrics."""
        from phalanx.server.operator_routes import create_admin_app

        open_paths = (*PROBE_PATHS, "/version")
        app = Guard(create_admin_app(service), KeyRing(), MAX_COCKPIT_BODY, open_paths=open_paths)
        return self._uvicorn(app, door)

    def _uvicorn(self, app: ASGIApp, door: Door) -> uvicorn.Config:
        return uvicorn.Config(
            app,
            **protocol(door),
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(self._options.drain_timeout_s) + _SHUTDOWN_MARGIN_S,
        )

    def _hang_up(self) -> None:
        """Of a closed terminal it means the end; a service has none, and is told to read its files anew."""
        if sys.stdout.isatty() or sys.stderr.isatty():
            self._stop()
        else:
            reload(self._options, self._tls)

    def _stop(self) -> None:
        """The first signal lets running requests finish in time; the second does not."""
        if self._supervisor.state == "draining":
            self._end_requests()
            return
        wait = self._options.drain_timeout_s
        log.info("stopping: %d requests may finish within %g s", self._supervisor.client.live, wait)
        self._supervisor.drain()
        if self._http is not None:
            self._http.should_exit = True
        asyncio.get_running_loop().call_later(wait, self._end_requests)
        _end_in_any_case(wait + _LATEST_END_S)

    def _end_requests(self) -> None:
        self._supervisor.client.close_mailboxes(ApiError(503, "The server is stopping.", "server_stopping"))

    async def _tell_loading(self) -> None:
        """A line at once, and one every few seconds while weights are read."""
        log.info("loading %s, TP=%d", self._name, self._config.tp)
        told = 0
        while self._supervisor.state == "starting":
            await asyncio.sleep(_LOADING_TOLD_EVERY_S)
            loading = self._supervisor.client.loading
            if loading is not None and loading.done > told and self._supervisor.state == "starting":
                log.info("loaded %.1f of %.1f GB of weights", loading.done / 1e9, loading.total / 1e9)
                told = loading.done

    def _engine_started(self, started: Started) -> None:
        self._metrics.engine_started(started.num_blocks)
        self._announce()

    def _announce(self) -> None:
        """Once both the engine and the HTTP server are there."""
        started = self._supervisor.client.started
        if started is None or self._http is None:
            return
        told = announcement(self._name, self._config, self._options, started, self._address)
        if self._options.log_format == "json":
            log.info("%s", told.partition("\n")[0])
        else:
            print(told, flush=True)
        if self._admin_address is not None:
            log.info("probes and metrics, without a key: %s/", url_of("http", self._admin_address))


def leave_to_stay() -> None:
    """What there is by now stays: the garbage collector need not look at it whenever thousands of connections come."""
    gc.collect()
    gc.freeze()


def _end_in_any_case(seconds: float) -> None:
    """Threads that hang are waited for at the end of a process; its children end with it, whatever they do."""

    def end() -> None:
        log.error("something hangs: ended %g s after the signal", seconds)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
