"""Settings: where values come from, and that a wrong one stops the process by name."""

import json

import pytest

from engines.mock.engine import MockEngineSettings
from engines.registry import read_settings, settings_classes
from shared.settings.load import load_settings, rows, to_environment
from shared.settings.tree import SettingsError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLM_REDIS_URL", raising=False)


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Write the configuration file; returns its path."""

    def write(content: str | bytes) -> str:
        file = tmp_path / "fleet.yaml"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        monkeypatch.setenv("VLM_CONFIG", str(file))
        return str(file)

    return write


def test_arguments_override_the_environment_field_by_field(monkeypatch):
    monkeypatch.setenv("VLM_GATEWAY__PORT", "8123")
    monkeypatch.setenv("VLM_GATEWAY__HOST", "::1")
    settings = load_settings(gateway={"port": 0})
    assert (settings.gateway.port, settings.gateway.host) == (0, "::1")


def test_environment_overrides_the_configuration_file(monkeypatch, configured):
    configured("gateway: {port: 1, host: '::1'}\nengine: {kind: mock, mock: {decode_s: 0.5}}\n")
    monkeypatch.setenv("VLM_GATEWAY__PORT", "2")
    settings = load_settings()
    assert (settings.gateway.port, settings.gateway.host) == (2, "::1")
    assert settings.engine.values() == {"kind": "mock", "mock": {"decode_s": 0.5}}


def test_dotenv_file_may_hold_the_variables_of_other_programs(tmp_path, configured):
    configured("# nothing yet\n")
    (tmp_path / ".env").write_text("GATEWAY_PORT=9000\nHF_TOKEN=x\nVLM_GATEWAY__PORT=9001\n")
    assert load_settings().gateway.port == 9001


def test_api_keys_are_split_at_commas_and_never_shown(monkeypatch):
    monkeypatch.setenv("VLM_GATEWAY__API_KEYS", "sk-one, sk-two")
    keys = load_settings().gateway.api_keys
    assert [key.get_secret_value() for key in keys] == ["sk-one", "sk-two"]
    assert "sk-one" not in repr(keys)


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("VLM_GATEWAY__PORT", "70000", "VLM_GATEWAY__PORT"),
        ("VLM_CONFIG", "/does/not/exist.yaml", "VLM_CONFIG"),
        ("VLM_WORKER__LEASE_S", "0.1", "VLM_WORKER__LEASE_S"),
        ("VLM_GATEWAY", "{port", "gateway"),
    ],
)
def test_bad_or_unknown_setting_is_refused_by_name(monkeypatch, name, value, named):
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=named):
        load_settings()


#: of the gateway, what is written there, and what the refusal begins with
WRONG_NAMES = [
    *((name, value, f"{name}: write a JSON object")
      for name in ("PRICES", "ALIASES", "FALLBACKS", "MODEL_DEFAULTS") for value in ([], 5, "x")),
    *(("ALIASES", value, "ALIASES: name for each alias a model") for value in (
        {"a": "a"}, {"a": "b", "b": "c"}, {"a": ""}, {"": "a"}, {"a\n": "b"})),
    *(("FALLBACKS", value, "FALLBACKS: name for each model another") for value in (
        {"a": "a"}, {"a": ""}, {"": "a"})),
    *(("MODEL_DEFAULTS", {"tiny": {name: value}}, f"MODEL_DEFAULTS__TINY__{name.upper()}: ") for name, value in (
        ("temprature", 1), ("temperature", 3), ("max_tokens", 0))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "says"), WRONG_NAMES)
def test_impossible_prices_aliases_fallbacks_and_defaults_of_models_are_refused(
    monkeypatch, name, value, says
):
    monkeypatch.setenv(f"VLM_GATEWAY__{name}", json.dumps(value))
    with pytest.raises(SettingsError, match=f"VLM_GATEWAY__{says}"):
        load_settings()


@pytest.mark.parametrize(
    "url",
    [
        "http://host/0",
        "redis://",
        "unix://",
        "redis://user:pass/word@host:6379/0",
        "redis+sentinel://one+two",
        "redis+sentinel://one++two/name",
        "redis+sentinel://one:port/name",
        "redis+sentinel://one/name/database",
        "unix+sentinel://one/name",
    ],
)
def test_what_is_no_redis_url_is_refused_without_being_shown(monkeypatch, url):
    monkeypatch.setenv("VLM_REDIS_URL", url)
    with pytest.raises(SettingsError, match="VLM_REDIS_URL") as refused:
        load_settings()
    assert "redis://HOST" in str(refused.value)
    assert "word" not in str(refused.value).replace("password", "")


def test_the_address_of_redis_holds_no_password(monkeypatch):
    for url, address in (
        ("rediss://user:secret@example:6379/0?ssl_cert_reqs=none", "rediss://example:6379/0"),
        ("redis://:secret@[::1]:1/2", "redis://[::1]:1/2"),
        ("unix:///run/redis.sock?password=secret", "unix:///run/redis.sock"),
        (
            "redis+sentinel://u:secret@a:1+[::1]:2/name?sentinel_password=secret",
            "redis+sentinel://a:1+[::1]:2/name",
        ),
    ):
        monkeypatch.setenv("VLM_REDIS_URL", url)
        assert load_settings().redis.address == address


@pytest.mark.parametrize(
    "content", [b"- gateway\n", b"{1: 2}", b"\xff\xfe", b"gateway: [", b"\x07"]
)
def test_a_file_that_holds_no_settings_is_named_with_its_variable(configured, content):
    file = configured(content)
    with pytest.raises(SettingsError, match="VLM_CONFIG") as refused:
        load_settings()
    assert file in str(refused.value)


def test_a_dotenv_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / ".env").write_bytes(b"VLM_GATEWAY__HOST=\xff\n")
    with pytest.raises(SettingsError, match=r"\.env"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("VLM_GATEWAY__PRT", "VLM_GATEWAY__PORT"),
        ("VLM_GATEWY__PORT", "VLM_GATEWAY__PORT"),
        ("VLM_REDIS_ULR", "VLM_REDIS_URL"),
    ],
)
def test_a_misspelled_setting_is_told_the_closest_one(monkeypatch, tmp_path, name, meant):
    """Of the environment, and of a .env file."""
    for in_dotenv in (False, True):
        with monkeypatch.context() as patch:
            if in_dotenv:
                (tmp_path / ".env").write_text(f"{name}=80\n")
            else:
                patch.setenv(name, "80")
            with pytest.raises(SettingsError, match=f"{name}.*did you mean {meant}\\?"):
                load_settings()


@pytest.mark.parametrize("value", ["foo", "foo=", "=path", "a=b,foo", "a b=path", "a\n=path"])
def test_an_adapter_without_name_or_path_is_refused(monkeypatch, value):
    monkeypatch.setenv("VLM_WORKER__LORA", value)
    with pytest.raises(SettingsError, match=r"(?s)VLM_WORKER__LORA.*NAME=PATH"):
        load_settings()


def test_an_adapter_path_may_hold_an_equals_sign_and_a_short_lease_has_a_quick_heartbeat():
    worker = load_settings(worker={"lora": "a=b=c,d=e=", "lease_s": 2}).worker
    assert worker.adapters == {"a": "b=c", "d": "e="}
    assert worker.heartbeat_s == 0.2


def test_a_setting_that_became_a_constant_is_refused(monkeypatch, configured):
    configured("limits: {max_choices: 4, max_images: 3}\n")
    monkeypatch.setenv("VLM_GATEWAY__KEEP_ALIVE_S", "3")
    with pytest.raises(SettingsError) as error:
        load_settings()
    for name in ("VLM_LIMITS__MAX_CHOICES", "VLM_GATEWAY__KEEP_ALIVE_S"):
        assert f"{name}: this setting was removed, as its value is fixed now: unset it" in str(
            error.value
        )


def test_a_child_process_loads_the_same_settings_from_its_environment(monkeypatch):
    given = {
        "VLM_GATEWAY__API_KEYS": "sk-one,sk-two",
        "VLM_GATEWAY__ALIASES": '{"alias": "tiny"}',
        "VLM_GATEWAY__MODEL_DEFAULTS": '{"tiny": {"temperature": 0.25, "max_tokens": 9}}',
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    parent = load_settings(gateway={"port": 0}, engine={"kind": "mock", "mock": {"decode_s": "0"}})
    for name in given:
        monkeypatch.delenv(name)
    for name, value in to_environment(parent).items():
        monkeypatch.setenv(name, value)
    assert load_settings() == parent


def test_a_setting_that_no_deployment_sets_is_taken_and_not_listed():
    listed = {row.variable for row in rows(settings_classes())}
    assert "VLM_ENGINE__KV_CACHE_BYTES" in listed
    assert "VLM_ENGINE__BLOCK_SIZE" not in listed
    settings = read_settings({"kind": "mock", "block_size": "8"})
    assert isinstance(settings, MockEngineSettings)
    assert settings.block_size == 8


def test_every_setting_says_what_it_means():
    assert [row.variable for row in rows(settings_classes()) if not row.description] == []
