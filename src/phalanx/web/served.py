"""The cockpit beside an engine."""

from __future__ import annotations

from fastapi import FastAPI

from phalanx.server.gpu_watch import GpuWatch
from phalanx.server.service import Service
from phalanx.web.cockpit import About, cockpit_routes
from phalanx.web.layout_routes import Served, layout_routes
from phalanx.web.live import Live, live_route
from phalanx.web.pages import add_pages


class ServedCockpit:
    """Pages, the planner, the layout of the model that is served, and a live view of its engine."""

    def __init__(self, service: Service) -> None:
        self._service = service
        gpus = GpuWatch()
        service.metrics.add(gpus)
        self._live = Live(service.supervisor, service.metrics.recent, gpus, shared=service.keys.several)

    def mount(self, app: FastAPI) -> None:
        service, tp = self._service, self._service.supervisor.launch.config.tp
        add_pages(app)
        app.include_router(cockpit_routes(About("serve", service.name, tp)))
        app.include_router(layout_routes(Served(service.name, service.spec, tp)))
        app.include_router(live_route(self._live))

    async def run(self) -> None:
        await self._live.run()
