"""Tokens of an OpenID Connect issuer on loopback, with real keys, a real Redis and two gateways."""

import asyncio
import base64
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

jwt = pytest.importorskip("jwt")
pytest.importorskip("cryptography")

from cryptography.hazmat.primitives import serialization  # noqa: E402
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa  # noqa: E402
from jwt.algorithms import ECAlgorithm, HMACAlgorithm, OKPAlgorithm, RSAAlgorithm  # noqa: E402

from gateway.keys import oidc  # noqa: E402
from gateway.services import Services  # noqa: E402
from shared.settings import SettingsError  # noqa: E402
from shared.settings.tree import OidcSettings  # noqa: E402
from tests.factories_gateway import MODEL, make_settings, talk_on  # noqa: E402
from tests.factories_keys import PATH, ROOT, Team, bearer, open_team, run_command  # noqa: E402
from tests.http_server import Handler, serve_http  # noqa: E402
from tests.waiting import until, until_equal  # noqa: E402

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
WEAK = rsa.generate_private_key(public_exponent=65537, key_size=1024)
EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
STRANGER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
KEYS = {"rsa": ("RS256", RSA), "ec": ("ES256", EC), "ed": ("EdDSA", ED), "weak": ("RS256", WEAK)}
OWN = {"rsa": RSAAlgorithm, "ec": ECAlgorithm, "ed": OKPAlgorithm, "weak": RSAAlgorithm}


def to_jwk(kid: str, key: Any = None) -> dict[str, Any]:
    key = KEYS[kid][1] if key is None else key
    found = OWN.get(kid, RSAAlgorithm).to_jwk(key.public_key(), as_dict=True)
    return {**found, "kid": kid}


class Issuer:
    """An issuer that serves a discovery document and keys, and signs tokens."""

    def __init__(self) -> None:
        self.keys = [to_jwk(kid) for kid in KEYS]
        self.paths: list[str] = []
        self.answer: Callable[[Handler], object] | None = None  #: replaces the usual responses
        self.url = ""

    def serve(self, request: Handler) -> None:
        documents = {
            "/.well-known/openid-configuration": {
                "issuer": self.url,
                "jwks_uri": f"{self.url}/keys",
            },
            "/keys": {"keys": self.keys},
        }
        request.answer(200, json.dumps(documents[request.path]).encode())

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Returns claims; a change to None removes the claim."""
        usual = {
            "iss": self.url, "aud": "vlm", "sub": "alice", "exp": time.time() + 300, "vlm_key": "team",
        }  # fmt: skip
        return {name: value for name, value in {**usual, **changes}.items() if value is not None}

    def payload(self, **changes: Any) -> bytes:
        return json.dumps(self.claims(**changes)).encode()

    def token(self, kid: str = "rsa", **changes: Any) -> str:
        algorithm, key = KEYS[kid]
        return jwt.encode(self.claims(**changes), key, algorithm, {"kid": kid})


def part(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def sign(
    payload: bytes, sign: Callable[[bytes], bytes] | None = None, alg: str = "RS256", **header: Any
) -> str:
    """Returns a token with any payload and header, signed with the issuer's RSA key unless `sign` is given."""
    by_rsa = RSAAlgorithm(RSAAlgorithm.SHA256)
    sign = sign or (lambda data: by_rsa.sign(data, RSA))
    head = json.dumps({"alg": alg, "kid": "rsa", **header}).encode()
    signed = part(head) + b"." + part(payload)
    return (signed + b"." + part(sign(signed))).decode()


class _Handler(Handler):
    issuer: Issuer

    def do_GET(self) -> None:
        self.issuer.paths.append(self.path)
        (self.issuer.answer or self.issuer.serve)(self)


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    with serve_http(_Handler, issuer=issuer) as issuer.url:
        yield issuer


@asynccontextmanager
async def run_team(
    redis_url: str, prefix: str, issuer: Issuer, num_gateways: int = 2, files: str = "", **oidc: str
) -> AsyncIterator[Team]:
    own = OidcSettings(**{"issuer": issuer.url, "audience": "vlm", **oidc})
    keys = {"root_key": "the-root-key", "oidc": own, "files": files}
    limits = {"max_wrong_keys_per_minute": 0}
    settings = make_settings(redis_url, prefix, gateway=keys, limits=limits)
    async with open_team(settings, num_gateways) as team:
        if not (await team.admin("GET")).json()["data"]:
            await team.create("team")
        await team.refresh()
        yield team


@pytest.fixture
async def team(redis_server, redis_prefix, issuer) -> AsyncIterator[Team]:
    async with run_team(redis_server, redis_prefix, issuer) as team:
        yield team


async def test_a_token_is_a_key_and_each_subject_is_a_tenant_on_every_gateway(
    team: Team, issuer: Issuer
):
    for kid in ("rsa", "ec", "ed"):
        answer = await team.chat(issuer.token(kid, aud=["other", "vlm"], sub="carol"))
        assert answer.status_code == 200, answer.text
    assert issuer.paths[:2] == ["/.well-known/openid-configuration", "/keys"]
    team.worker.answers.clear()
    tokens = [issuer.token(), issuer.token("ec", vlm_key="other"), issuer.token(sub="bob")]
    await team.create("other")
    await team.refresh()
    for number in (0, 1):
        for token in tokens:
            assert (await team.chat(token, number)).status_code == 200
    monitor = await team.create("monitor", roles=["adapters"])
    metrics = (await team.get(monitor, "/metrics")).text
    assert 'vlm_key_tokens_total{key="team",type="input"}' in metrics
    assert "alice" not in metrics
    alice, again, bob, *others = (call.tenant for call in team.worker.requests)
    assert alice == again != bob
    assert others == [alice, again, bob]
    client, body = team.gateways[0].client, {"model": MODEL, "input": "hello"}
    kept = (await client.post("/v1/responses", json=body, headers=bearer(tokens[0]))).json()["id"]
    found = [(await team.get(token, f"/v1/responses/{kept}")).status_code for token in tokens]
    assert found == [200, 200, 404]


async def test_usage_and_forget_know_subjects_that_only_another_gateway_has_seen(
    team: Team, issuer: Issuer
):
    client, body = team.gateways[0].client, {"model": MODEL, "input": "hello"}
    token, other = issuer.token(sub="j\u00f6rg @x"), issuer.token()
    kept = [
        (await client.post("/v1/responses", json=body, headers=bearer(each))).json()["id"]
        for each in (token, other)
    ]
    admin = team.gateways[1].client

    async def names() -> list[str]:
        found = (await admin.get("/v1/usage?by=key", headers=ROOT)).json()["data"]
        return sorted(each["key"] for each in found)

    await until_equal(names, ["team:alice", "team:j\u00f6rg @x"], 5.0)
    done = await run_command(team.gateways[1], "forget", "--key", "team:j\u00f6rg @x")
    assert (done.exit_code, "deleted 1 answers" in done.stderr) == (0, True), done.output
    left = [
        (await team.get(each, f"/v1/responses/{id_}")).status_code
        for each, id_ in zip((token, other), kept, strict=True)
    ]
    assert left == [404, 200]
    unknown = await admin.post(f"{PATH}/team:nobody:forget", headers=ROOT)
    assert unknown.json()["error"]["code"] == "key_not_found"


def signed_with_the_public_key(issuer: Issuer) -> str:
    """Signs with HS256, as if the public key were a shared secret."""
    public = RSA.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )

    hs256 = HMACAlgorithm(HMACAlgorithm.SHA256)
    return sign(issuer.payload(), lambda data: hs256.sign(data, public), "HS256")


def of_a_weak_key(issuer: Issuer) -> str:
    rs256 = RSAAlgorithm(RSAAlgorithm.SHA256)
    return sign(issuer.payload(), lambda data: rs256.sign(data, WEAK), kid="weak")


def header_bomb(_: Issuer) -> str:
    head = base64.urlsafe_b64encode(b'{"alg":"RS256","kid":' + b"[" * 6000).rstrip(b"=").decode()
    return f"{head}.e30.e30"


def payload_bomb(issuer: Issuer) -> str:
    text = json.dumps(issuer.claims())[:-1] + ', "x": ' + "[" * 5000 + "]" * 5000 + "}"
    return sign(text.encode())


BAD: list[tuple[str | Callable[[Issuer], str], str]] = [
    (lambda i: jwt.encode(i.claims(), None, "none", {"kid": "rsa"}), "alg"),
    (signed_with_the_public_key, "alg"),
    (lambda i: jwt.encode(i.claims(), RSA, "PS256", {"kid": "rsa"}), "alg"),
    (lambda i: jwt.encode(i.claims(), STRANGER, "RS256", {"kid": "rsa"}), "signature"),
    (lambda i: jwt.encode(i.claims(), RSA, "RS256", {"kid": "of-nobody"}), "kid"),
    (lambda i: jwt.encode(i.claims(), RSA, "RS256"), "kid"),
    (lambda i: sign(i.payload(), kid=["rsa"]), "malformed"),
    (lambda i: sign(i.payload(), crit=["own"]), "malformed"),
    (of_a_weak_key, "too short"),
    (lambda i: i.token()[:-3] + "AAA", "signature"),
    (lambda i: i.token(aud="other"), "another audience"),
    (lambda i: i.token(iss=i.url + "/"), "another issuer"),
    (lambda i: i.token(exp=time.time() - oidc.LEEWAY_S - 1), "expired"),
    (lambda i: i.token(nbf=time.time() + oidc.LEEWAY_S + 60), "not valid yet"),
    (lambda i: i.token(sub=None), "the claim sub"),
    (lambda i: i.token(vlm_key=None), "the claim vlm_key"),
    (lambda i: i.token(vlm_key="nobody"), "the stored key"),
    (lambda i: i.token(sub="a" * 257), "not printable text"),
    (lambda i: i.token(sub="a\ud800"), "not printable text"),
    (lambda i: sign(i.payload(sub=7)), "malformed"),
    (lambda i: sign(i.payload(exp=float("inf"))), "malformed"),
    (lambda i: sign(b"\xff"), "malformed"),
    (payload_bomb, "malformed"),
    (header_bomb, "malformed"),
    (lambda i: i.token(x="a" * 20_000), "longer than 16384 bytes"),
    ("eyJ.\xe9.c", "malformed"),
]  # fmt: skip


async def test_wrong_tokens_are_refused_with_the_reason(redis_server, redis_prefix, issuer):
    async with run_team(redis_server, redis_prefix, issuer, 1) as team:
        for make, reason in BAD:
            token = make if isinstance(make, str) else make(issuer)
            header = f"Bearer {token}".encode("latin-1")
            [gateway] = team.gateways
            answer = await gateway.client.get("/v1/models", headers={b"authorization": header})
            assert answer.status_code == 401, (reason, answer.text)
            error = answer.json()["error"]
            assert error["code"] == "invalid_token", reason
            assert reason in error["message"], (reason, error)
            assert len(error["message"]) < 120
        assert (await team.get(issuer.token())).status_code == 200


async def test_forged_key_ids_do_not_reach_the_issuer(team: Team, issuer: Issuer):
    assert (await team.get(issuer.token())).status_code == 200
    num_before = len(issuer.paths)
    forged = [
        jwt.encode(issuer.claims(), STRANGER, "RS256", {"kid": str(number)}) for number in range(5)
    ]
    answers = await asyncio.gather(*(team.get(token) for token in forged * 4))
    assert {answer.status_code for answer in answers} == {401}
    assert len(issuer.paths) - num_before <= 2  # one read of the discovery document and the keys


async def test_known_keys_work_while_the_issuer_is_away_or_slow_and_new_ones_once_it_is_back(
    team: Team, issuer: Issuer, monkeypatch
):
    monkeypatch.setattr(oidc, "RETRY_S", 0.0)
    monkeypatch.setattr(oidc, "_TIMEOUT_S", 0.5)
    assert (await team.get(issuer.token())).status_code == 200
    new = jwt.encode(issuer.claims(), STRANGER, "RS256", {"kid": "new"})
    issuer.answer = lambda request: request.answer(500)
    refused = await team.get(new)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert (await team.get(issuer.token(sub="bob"))).status_code == 200
    gate = threading.Event()
    issuer.answer = lambda _: gate.wait(30)
    waiting = asyncio.create_task(team.get(new))
    try:
        assert (await team.get(issuer.token(sub="carol"))).status_code == 200
        assert not waiting.done()
        assert (await waiting).status_code == 503
    finally:
        gate.set()
    issuer.answer, issuer.keys = None, [to_jwk("new", STRANGER)]
    assert (await team.get(new)).status_code == 200
    withdrawn = await team.get(issuer.token())  # the token had been verified before
    assert withdrawn.status_code == 401


def redirect(request: Handler) -> None:
    request.answer(302, location="http://127.0.0.1:9/keys")


NONSENSE = (
    redirect,
    lambda request: request.answer(200, b"x" * 300_000),
    lambda request: request.answer(200, b"[" * 100_000),
    lambda request: request.answer(200, b'{"keys": 1}'),
    lambda request: request.answer(200, b'{"issuer": "https://other", "jwks_uri": "https://x"}'),
)


async def test_an_issuer_with_invalid_responses_at_startup_is_asked_again(
    redis_server, redis_prefix, issuer, monkeypatch
):
    monkeypatch.setattr(oidc, "RETRY_S", 0.0)
    issuer.answer = redirect
    async with run_team(redis_server, redis_prefix, issuer, 1) as team:
        for issuer.answer in NONSENSE:
            assert (await team.get(issuer.token())).status_code == 503
            assert (await team.get("the-root-key", PATH)).status_code == 200
        issuer.answer = None
        assert (await team.get(issuer.token())).status_code == 200


async def test_keys_for_other_uses_are_left_out(redis_server, redis_prefix, issuer):
    secret = {"kty": "oct", "kid": "secret", "k": "A" * 44, "alg": "HS256"}
    other = [{**to_jwk("rsa"), "use": "enc"}, {"kty": "RSA", "kid": "bad"}, secret, {"kty": "RSA"}]
    issuer.keys = [*other, to_jwk("ec")]
    async with run_team(redis_server, redis_prefix, issuer, 1) as team:
        assert (await team.get(issuer.token())).status_code == 401
        hmac = jwt.encode(issuer.claims(), bytes(33), "HS256", {"kid": "secret"})
        assert (await team.get(hmac)).status_code == 401
        assert (await team.get(issuer.token("ec"))).status_code == 200


async def test_roles_models_and_limits_are_those_of_the_key_that_the_token_names(
    team: Team, issuer: Issuer
):
    client = team.gateways[0].client
    await team.create("boss", roles=["admin"])
    await team.create("few", requests_per_minute=2, max_output_tokens=8)
    await team.create("other", models=["qwen*"])
    assert (await team.get(issuer.token(), PATH)).status_code == 403
    boss = issuer.token(vlm_key="boss")
    assert (await team.get(boss, PATH)).status_code == 200
    assert (await team.get(boss)).status_code == 403
    other = issuer.token(vlm_key="other")
    assert (await team.get(other)).json()["data"] == []
    assert (await team.chat(other)).json()["error"]["code"] == "model_not_allowed"
    for subject in ("alice", "bob"):  # each subject has its own limit
        few = issuer.token(sub=subject, vlm_key="few")
        assert (await team.chat(few, max_tokens=9)).status_code == 400
        statuses = [(await team.chat(few)).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
    await client.request("DELETE", f"{PATH}/few", headers=bearer(boss))
    entries = (await client.get("/v1/admin/audit", headers=ROOT)).json()["data"]
    assert (entries[0]["key"], entries[0]["action"]) == ("boss:alice", "revoke_key")


async def test_another_claim_names_the_caller_and_a_default_its_key(
    redis_server, redis_prefix, issuer
):
    own = {"name_claim": "email", "default_key": "boss", "jwks_url": f"{issuer.url}/keys"}
    async with run_team(redis_server, redis_prefix, issuer, 1, **own) as team:
        await team.create("boss", roles=["admin"])
        assert "email" in (await team.get(issuer.token())).text
        token = issuer.token(vlm_key=None, email="[bold]a@example.com")
        made = await team.gateways[0].client.post(PATH, json={"name": "x"}, headers=bearer(token))
        assert made.status_code == 200, made.text
        audit = (await team.get("the-root-key", "/v1/admin/audit")).json()["data"]
        assert audit[0]["key"] == "boss:[bold]a@example.com"
        assert issuer.paths[0] == "/keys"


async def test_revoking_the_key_ends_the_streams_of_its_tokens_on_every_gateway(
    team: Team, issuer: Issuer
):
    team.worker.script = talk_on
    await team.create("other")
    await team.refresh()
    tokens = [issuer.token(sub=name) for name in ("alice", "bob")]
    lasting = issuer.token(sub="carol", vlm_key="other")
    streams = [
        asyncio.create_task(team.chat(token, number, stream=True, max_tokens=4096))
        for token, number in zip([*tokens, lasting], (0, 1, 0), strict=True)
    ]
    await until(lambda: len(team.worker.answers) == 3)
    began_at = time.monotonic()
    await team.admin("DELETE", "/team")
    ended = await asyncio.gather(*streams[:2])
    assert time.monotonic() - began_at < 2.0
    assert all("The API key of this request was revoked or expired." in each.text for each in ended)
    assert not streams[2].done()
    refused = [await team.get(token, number=n) for token in tokens for n in (0, 1)]
    assert {answer.status_code for answer in refused} == {401}
    streams[2].cancel()
    await asyncio.gather(*streams, return_exceptions=True)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"root_key": ""}, "VLM_GATEWAY__ROOT_KEY"),
        ({"audience": ""}, "VLM_GATEWAY__OIDC__AUDIENCE"),
        ({"issuer": "http://id.example.com"}, "OIDC__ISSUER: use"),
        ({"jwks_url": "file:///x"}, "OIDC__JWKS_URL: use"),
        ({}, r"pip install '\.\[oidc\]'"),
    ],
)
def test_a_gateway_with_wrong_settings_does_not_start(
    monkeypatch, changes: dict[str, str], says: str
):
    if not changes:
        monkeypatch.setitem(sys.modules, "gateway.keys.oidc", None)
    given = {"root_key": "root", "issuer": "https://id.example.com", "audience": "vlm", **changes}
    root_key = given.pop("root_key")
    keys = {"root_key": root_key, "oidc": OidcSettings(**given)}  # type: ignore[arg-type]
    with pytest.raises(SettingsError, match=says):
        Services(make_settings("redis://127.0.0.1:9", "x", gateway=keys))


async def test_a_stream_continues_after_its_token_expired(team: Team, issuer: Issuer, monkeypatch):
    monkeypatch.setattr(oidc, "LEEWAY_S", 0.0)
    team.worker.script = talk_on
    token = issuer.token(exp=time.time() + 1)
    stream = asyncio.create_task(team.chat(token, stream=True, max_tokens=4096))
    await until(lambda: team.worker.answers)

    async def is_expired() -> bool:
        return "expired" in (await team.get(token)).text

    await until(is_expired)
    assert not stream.done()
    assert team.worker.answers[0].refused is None
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
