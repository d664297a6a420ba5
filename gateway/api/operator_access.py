"""What requests of operators have in common: whose key it is, and their body."""

from collections.abc import Callable, Sequence

from fastapi import Request

from gateway.http.admission import Admission
from gateway.http.auth import WrongKey
from gateway.http.body import JSON, JsonBody, T, read_body
from gateway.http.context import SCOPE_KEY
from gateway.http.wrong_keys import WrongKeys
from shared.settings.tree import Settings


class OperatorAccess:
    """Lets in the keys of one class. `check_key`: a method of `KeyRing`."""

    def __init__(
        self,
        check_key: Callable[[Sequence[tuple[bytes, bytes]]], str],
        wrong_keys: WrongKeys,
        admission: Admission,
        settings: Settings,
    ) -> None:
        self._check_key = check_key
        self._wrong_keys = wrong_keys
        self._admission = admission
        self._settings = settings

    def check(self, request: Request) -> str:
        """The caller's cache salt. Raises: ApiError for a key that may not; wrong ones count against their host."""
        try:
            return self._check_key(request.scope["headers"])
        except WrongKey:
            host, _ = request.scope.get("client") or ("", 0)
            self._wrong_keys.count(host)
            raise

    async def read(self, request: Request, body: JsonBody[T]) -> T:
        """The body, once the key is checked. Raises: ApiError."""
        return body.decode(await self.read_bytes(request, JSON))

    async def read_bytes(self, request: Request, media_type: bytes) -> bytes:
        """The body as it came, once the key is checked. Raises: ApiError."""
        self.check(request)
        with self._admission.hold_body() as held:
            timeout_s = self._settings.gateway.body_timeout_s
            context, limits = request.scope[SCOPE_KEY], self._settings.limits
            return await read_body(
                request.receive, context, held, limits, timeout_s=timeout_s, media_type=media_type
            )
