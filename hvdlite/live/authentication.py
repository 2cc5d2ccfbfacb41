"""Who may look at the page of a job: those who have its token, under a name of this host."""

from __future__ import annotations

import hmac
import re

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hvdlite.live.listener import Listener

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::([0-9]{1,5}))?")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_ASK = (
    "This page needs the token of its job. Open the whole address that was printed when the job "
    "began, with ?token=... at its end. If you followed a link here, load the page again.\n"
)


class Authentication:
    """An application in front of another one: it lets requests with the token pass."""

    # The token comes as `/?token=...`, which becomes a cookie, as that cookie, or as a bearer
    # token. The name in the Host header has to be one of this host: otherwise a website whose name
    # was made to point here (DNS rebinding) could use a browser to ask.

    def __init__(self, app: ASGIApp, listener: Listener) -> None:
        self._app = app
        self._names = listener.names
        self._token = listener.token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        app = self._refusal(Request(scope)) or self._app
        await app(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that does not pass; None if it passes."""
        found = _HOST.fullmatch(request.headers.get("host", ""))
        name = (found[1] or found[2]).lower() if found else ""
        server = request.scope.get("server") or ("",)
        if found is None or (name not in self._names and name != server[0]):
            return PlainTextResponse("The Host header does not name this host.\n", 400)
        cookie = f"hvdlite-live-{found[3] or 80}"  # A browser has one set of cookies for all ports.
        given = request.query_params.get("token")
        if request.scope["path"] == "/" and given is not None:
            if not self._fits(given):
                return self._ask()
            answer = RedirectResponse("/", 303)
            answer.set_cookie(cookie, given, httponly=True, samesite="strict")
            return answer
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._fits(bearer.strip()):
            return None
        return None if self._fits(request.cookies.get(cookie, "")) else self._ask()

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token)

    def _ask(self) -> Response:
        return PlainTextResponse(_ASK, 401, {"WWW-Authenticate": 'Bearer realm="hvdlite"'})
