"""Wrong keys: counted per client address and refused beyond a limit; a right key always passes."""

import pytest

from gateway.http import auth
from gateway.http.auth import MAX_ADDRESSES, WINDOW_S, WrongKeys
from gateway.http.errors import RateLimited
from tests.factories_gateway import CHAT, make_body
from tests.factories_keys import bearer

CHANGES = {"gateway": {"api_keys": ("sk-one",)}, "limits": {"max_wrong_keys_per_minute": 5}}


def is_refused(keys: WrongKeys, address: str) -> bool:
    try:
        keys.count(address)
    except RateLimited:
        return True
    return False


@pytest.mark.parametrize("changes", [CHANGES])
async def test_too_many_wrong_keys_are_refused_and_a_right_key_is_not(
    gateway, worker, changes, caplog
):
    statuses = []
    for number in range(12):
        answer = await gateway.client.post(CHAT, json=make_body(), headers=bearer(f"sk-{number}"))
        statuses.append(answer.status_code)
        assert (await gateway.chat(headers=bearer("sk-one"))).status_code == 200
    assert statuses == [401] * 5 + [429] * 7
    assert answer.json()["error"]["code"] == "too_many_wrong_keys"
    assert 1 <= int(answer.headers["retry-after"]) <= WINDOW_S
    assert caplog.text.count("127.0.0.1 sends wrong API keys") == 1
    assert (await gateway.client.get("/v1/models")).status_code == 401  # no key is not counted
    assert (await gateway.client.get("/healthz", headers=bearer("sk-9"))).status_code == 200
    for name in ("x-forwarded-for", "forwarded", "x-real-ip"):  # a client cannot choose its address
        headers = {**bearer("sk-wrong"), name: "10.0.0.1"}
        assert (await gateway.client.get("/v1/models", headers=headers)).status_code == 429


def test_wrong_keys_are_forgotten_after_a_minute():
    now = 100.0
    keys = WrongKeys(2, lambda: now)
    assert [is_refused(keys, "10.0.0.1") for _ in range(3)] == [False, False, True]
    assert not is_refused(keys, "10.0.0.2")
    now += WINDOW_S
    assert not is_refused(keys, "10.0.0.1")


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("", "not an address", True),
    ],
)
def test_addresses_of_one_client_count_together(one, other, is_same):
    keys, unlimited = WrongKeys(1), WrongKeys(0)
    assert not is_refused(keys, one)
    assert is_refused(keys, other) == is_same
    assert not any(is_refused(unlimited, one) for _ in range(100))


def test_the_oldest_of_too_many_addresses_are_evicted(monkeypatch):
    monkeypatch.setattr(auth, "MAX_ADDRESSES", 100)
    assert MAX_ADDRESSES >= 1000
    keys = WrongKeys(1)
    addresses = [f"10.0.{number // 250}.{number % 250}" for number in range(500)]
    for address in addresses:
        keys.count(address)
    assert all(is_refused(keys, address) for address in addresses[400:])
    assert not any(is_refused(keys, address) for address in addresses[:400])
