"""Settings: the precedence of their sources, and errors that name the wrong setting."""

import pytest

from engines.registry import settings_classes
from shared.settings.load import load_settings, rows, to_environment
from shared.settings.tree import SettingsError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLM_REDIS_URL", raising=False)


@pytest.fixture
def configured(monkeypatch, tmp_path):
    """Returns a function that writes the configuration file and returns its path."""

    def write(content: str | bytes) -> str:
        file = tmp_path / "fleet.yaml"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        monkeypatch.setenv("VLM_CONFIG", str(file))
        return str(file)

    return write


def test_arguments_override_the_environment_and_this_the_configuration_file(
    monkeypatch, configured
):
    configured(
        "gateway: {port: 1, host: '::1', drain_s: 3}\nengine: {kind: mock, mock: {decode_s: 0.5}}\n"
    )
    monkeypatch.setenv("VLM_GATEWAY__PORT", "2")
    monkeypatch.setenv("VLM_GATEWAY__HOST", "::2")
    settings = load_settings(gateway={"port": 0})
    gateway = settings.gateway
    assert (gateway.port, gateway.host, gateway.drain_s) == (0, "::2", 3)
    assert settings.engine.values() == {"kind": "mock", "mock": {"decode_s": 0.5}}


def test_api_keys_are_split_at_commas_and_never_shown(monkeypatch):
    monkeypatch.setenv("VLM_GATEWAY__API_KEYS", "sk-one, sk-two")
    keys = load_settings().gateway.api_keys
    assert [key.get_secret_value() for key in keys] == ["sk-one", "sk-two"]
    assert "sk-one" not in repr(keys)


#: A variable, its value, and a part of the error.
REFUSED = [
    ("GATEWAY__PORT", "70000", "VLM_GATEWAY__PORT"),
    ("CONFIG", "/does/not/exist.yaml", "VLM_CONFIG"),
    ("WORKER__LEASE_S", "0.1", "VLM_WORKER__LEASE_S"), ("GATEWAY__DRAIN_S", "inf", "DRAIN_S: .*finite"),
    ("GATEWAY", "{port", "gateway"),
    ("GATEWAY__PRT", "80", r"VLM_GATEWAY__PRT: .* did you mean VLM_GATEWAY__PORT\? .*`vlm settings`"),
    ("GATEWY__PORT", "80", r"VLM_GATEWY__PORT: .* did you mean VLM_GATEWAY__PORT\?"),
    ("REDIS_ULR", "x", r"VLM_REDIS_ULR: .* did you mean VLM_REDIS_URL\?"),
    ("GATEWAY__KEEP_ALIVE_S", "3", "VLM_GATEWAY__KEEP_ALIVE_S: there is no such setting"),
    *((f"GATEWAY__{name}", value, f"VLM_GATEWAY__{name}: write a JSON object")
      for name in ("PRICES", "ALIASES", "FALLBACKS", "MODEL_DEFAULTS") for value in ("[]", "{", "5")),
    *(("GATEWAY__ALIASES", value, "GATEWAY__ALIASES: map each alias to a model") for value in (
        '{"a": "b", "b": "c"}', '{"": "a"}', r'{"a\n": "b"}')),
    ("GATEWAY__FALLBACKS", '{"a": "a"}', "GATEWAY__FALLBACKS: map each model to another"),
    ("GATEWAY__MODEL_DEFAULTS", '{"tiny": {"temprature": 1}}', "DEFAULTS__TINY__TEMPRATURE: "),
    ("GATEWAY__MODEL_DEFAULTS", '{"tiny": {"temperature": 3}}', "DEFAULTS__TINY__TEMPERATURE: "),
    *(("REDIS_URL", url, "VLM_REDIS_URL.* redis://HOST") for url in (
        "http://host/0", "unix://", "redis://user:pass/word@host:6379/0", "redis+sentinel://one+two",
        "redis+sentinel://one:port/name", "unix+sentinel://one/name")),
    *(("WORKER__LORA", value, "VLM_WORKER__LORA.* NAME=PATH") for value in (
        "foo", "foo=", "=path", "a=b,foo", "a b=path", "a\n=path")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "says"), REFUSED)
def test_invalid_settings_are_refused_by_name_without_passwords(monkeypatch, name, value, says):
    monkeypatch.setenv(f"VLM_{name}", value)
    with pytest.raises(SettingsError, match=says) as refused:
        load_settings()
    assert "pass/word" not in str(refused.value)


def test_the_displayed_address_of_redis_has_no_password(monkeypatch):
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


@pytest.mark.parametrize("content", [b"- gateway\n", b"\xff\xfe", b"gateway: ["])
def test_the_error_of_an_invalid_file_names_the_file_and_its_variable(configured, content):
    file = configured(content)
    with pytest.raises(SettingsError, match="VLM_CONFIG") as refused:
        load_settings()
    assert file in str(refused.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"VLM_GATEWAY__HOST=\xff\n", r"\.env"), (b"VLM_GATEWY__PORT=80\n", "VLM_GATEWAY__PORT")],
)
def test_a_dotenv_file_is_validated(tmp_path, content, says):
    (tmp_path / ".env").write_bytes(content)
    with pytest.raises(SettingsError, match=says):
        load_settings()


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


def test_every_setting_has_a_description():
    assert [row.variable for row in rows(settings_classes()) if not row.description] == []
