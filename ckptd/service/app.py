"""The HTTP application: a front door to the ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from ckptd import __version__
from ckptd.ledger import Ledger
from ckptd.service import problems
from ckptd.service.auth import TokenGate
from ckptd.service.context import Service
from ckptd.service.door import Door
from ckptd.service.holds import Holds
from ckptd.service.limits import Limits
from ckptd.service.presence import Presence
from ckptd.service.routes import damage, health, incarnations, keeping, people, runs, saves
from ckptd.service.settings import ServiceSettings
from ckptd.storage import open_storage
from ckptd.storage.probe import refuse_unfit

_PROBLEM = {"content": {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"description": "Unauthorized: the token is missing or another one", **_PROBLEM},
    404: {"description": "Not found", **_PROBLEM},
    409: {"description": "Fenced, conflict, in use or corrupt: see `code`", **_PROBLEM},
    413: {"description": "The body is too large", **_PROBLEM},
    422: {"description": "Invalid: `fields.field` names what is wrong", **_PROBLEM},
    500: {"description": "A fault of the service; its log has the reference", **_PROBLEM},
    503: {"description": "Unavailable, or the outcome is unknown: the same call again finds out", **_PROBLEM},
}


def create_app(
    settings: ServiceSettings,
    ledger: Ledger | None = None,
    *,
    presence: Presence | None = None,
    holds: Holds | None = None,
) -> FastAPI:
    """The application over `ledger`, by default one on the storage of `settings`.

    `NotInitialised` if that has no marker, `Unfit` if it cannot carry a run. Call it once per process and event loop.
    """
    if ledger is None:
        storage = open_storage(settings.storage)
        refuse_unfit(storage)
        ledger = Ledger(storage, deadline_seconds=settings.storage_deadline_seconds)
    service = Service.over(ledger, settings, presence, holds)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.stop()

    app = FastAPI(
        title="ckptd",
        version=__version__,
        description="Checkpoints and resume for distributed training. Payload never comes this way.",
        lifespan=lifespan,
        docs_url=None,  # their pages load scripts from elsewhere; /openapi.json says it all
        redoc_url=None,
    )
    app.state.service = service
    guarded = [Security(HTTPBearer(auto_error=False))]  # for the documentation: TokenGate is what checks
    for router in (runs.router, incarnations.router, saves.router, damage.router, keeping.router, people.router):
        app.include_router(router, prefix="/v1", responses=_PROBLEMS, dependencies=guarded)
    app.include_router(health.router, responses={503: _PROBLEMS[503]})
    problems.install(app)
    app.add_middleware(Door, service=service)
    app.add_middleware(
        Limits,
        max_body_bytes=settings.max_body_bytes,
        body_deadline_seconds=settings.body_deadline_seconds,
        max_requests=settings.max_requests,
    )
    if settings.token is not None:
        app.add_middleware(TokenGate, token=settings.token.get_secret_value())
    app.add_middleware(problems.CatchAll)
    _document_problems(app)
    return app


def _document_problems(app: FastAPI) -> None:
    """Put the schema of problems, which no route returns, where the answers refer to it."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        document = generate()
        document["components"]["schemas"]["Problem"] = problems.Problem.model_json_schema()
        return document

    app.openapi = openapi  # type: ignore[method-assign]
