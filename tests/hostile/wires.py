"""Attacks that no HTTP library would send: raw bytes, and the expected status of the gateway."""

from tests.hostile.fleet import CANARY, CHAT, KEYS

AUTH = b"authorization: Bearer " + KEYS["a"].encode() + b"\r\n"
HOST = b"host: x\r\nconnection: close\r\n" + AUTH
JSON = b"content-type: application/json\r\n"
GET = b"GET /v1/models HTTP/1.1\r\n" + HOST
POST = b"POST " + CHAT.encode() + b" HTTP/1.1\r\n" + HOST + JSON
END = b"\r\n"
#: Bytes to send, and the allowed statuses; 0: the connection is closed without a response.
Wire = tuple[bytes, set[int]]


def get(target: str, host: bytes = b"host: x\r\n") -> bytes:
    return b"GET " + target.encode() + b" HTTP/1.1\r\nconnection: close\r\n" + host + END


def chunked(*chunks: bytes) -> bytes:
    return POST + b"transfer-encoding: chunked\r\n\r\n" + b"".join(chunks)


WIRES: dict[str, list[Wire]] = {
    "targets and hosts": [
        *[(get(target), {400, 401, 404}) for target in (
            "//v1/models", "/v1/../v1/models", "/%76%31/models", "/v1/models/", "http://x/v1/models", "@google.com",
            "/healthz/../v1/models", "/healthz;/v1/models", "/healthz%2f..%2fv1/models",
        )],
        *[(get("/v1/models", host), {400, 401}) for host in (
            b"", b"host:\r\n", b"host: /healthz?x=\r\n", b"host: a/?x=\r\n", b"host: x\r\nhost: y\r\n",
        )],
    ],
    "large heads": [
        (GET + b"a: " + b"b" * 1_000_000 + b"\r\n" + END, {400, 0}),
        (GET + b"".join(b"h%d: x\r\n" % i for i in range(20_000)) + END, {400, 0}),
    ],
    "smuggling": [
        (POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", {400}),
        (POST + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{}", {400}),
        (POST + b"content-length: -1\r\n\r\n", {400}),
        (POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n", {400}),
        (POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n", {400}),
        (GET + b" folded\r\n" + END, {400}),
        (b"GET /v1/models HTTP/1.1\nhost: x\n\n", {400, 401, 0}),
    ],
    "content encodings": [(POST + b"content-encoding: %b\r\ncontent-length: 2\r\n\r\n{}" % code, {415})
           for code in (b"gzip", b"zstd", b"br", b"identity, gzip")],
    "expectations": [(POST + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n", {100})],
    "chunks": [
        (chunked(*[b"1\r\n \r\n"] * 20_000, b"0\r\n\r\n"), {400}),
        (chunked(b"FFFFFFFFFFFFFFFF\r\n"), {400, 413, 408}),
        (chunked(b"FFFFFFFFFFFFFFFFF\r\n"), {400, 413, 408}),
        (chunked(b"2;" + b"x" * 1_000_000 + b"\r\n{}\r\n0\r\n\r\n"), {400, 413, 0}),
        (chunked(b"2\r\n{}\r\n0\r\nhost: y\r\n\r\n"), {400}),
        (chunked(b"-1\r\n"), {400}),
    ],
    "forms": [(POST.replace(b"application/json", b"multipart/form-data; boundary=x")
            + b"content-length: 2\r\n\r\n--", {400})],
    "protocols": [
        (b"GET /v1/models\r\n\r\n", {400, 401, 0}),
        (b"GET /v1/models HTTP/1.0\r\n\r\n", {401}),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", {400, 401, 0}),
        (b"CONNECT x:443 HTTP/1.1\r\nhost: x:443\r\nconnection: close\r\n\r\n", {400, 401, 404, 405, 0}),
        (GET.replace(b"close", b"upgrade") + b"upgrade: websocket\r\nsec-websocket-version: 13\r\n"
         b"sec-websocket-key: eA==\r\n" + END + GET + END, {200, 400}),
        (GET.replace(b"close", b"upgrade") + b"upgrade: h2c\r\n" + END + GET + END, {200, 400}),
    ],
    "methods and ranges": [
        (b"G" * 10_000 + b" / HTTP/1.1\r\n" + HOST + END, {400, 0}),
        (b"BREW / HTTP/1.1\r\n" + HOST + END, {400, 405, 0}),
        (GET + b"content-length: 2\r\n\r\n{}", {200}),
        (GET + b"range: bytes=0-1,0-2,0-3\r\n" + END, {200}),
    ],
    "event ids": [
        (GET.replace(b"/v1/models", b"/v1/streams/x") + b"last-event-id: %b\r\n" % value + END, {400, 404})
        for value in (b"../x", b"-1", b"9" * 10_000, CANARY.encode())
    ],
}  # fmt: skip
