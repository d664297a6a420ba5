"""Environments of deployments: allowed variables and secrets, and their effect on the version's digest."""

import pytest

from shared.packages.deployments import (
    BadEnvironment,
    Environment,
    check_environment,
    version_digest,
)

A = f"sha256:{'a' * 64}"
NODES = ("PATH", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "VLM_REDIS_URL", "vlm_engine__kind")
#: Variables that the interpreter, the loader or the sandbox obeys.
BEFORE = ("LD_PRELOAD", "ld_audit", "DYLD_X", "GLIBC_TUNABLES", "PYTHONPATH", "BASH_ENV")
#: Variables that only the application or its libraries obey.
OWN = ("ENV", "LANG", "LC_ALL", "TZ", "OMP_NUM_THREADS", "NODE_OPTIONS", "PERL5OPT", "HTTPS_PROXY")
NAMES = (
    "API_TOKEN",
    "tls.crt",
    "googleServiceAccountPrivateKey",
    "x" * 63,
    "prod-eu-1-s3-v2-rw-key",
)
# Values with the form of API keys; none of them is valid.
VALUES = (
    *("sk-" + "Ab3" * 8, "hf_" + "aBcDeF" * 6, "ghp_" + "z" * 36, "AKIA" + "Q7" * 8),
    *("0f1e2d3c4b5a69788796a5b4c3d2e1f0", "1b4e28ba-2fa1-11d2-883f-0016d3cca427"),
    *("xK9fQ2mZ7pLr4TvB1nWc", "postgres://me:pass@db/x", "two words", "pa$$word", "x" * 64),
)


@pytest.mark.parametrize(
    ("variables", "secrets", "says"),
    [
        *(({name: "x"}, {}, rf"variables\.{name}: the node") for name in NODES),
        *(({name: "x"}, {}, rf"variables\.{name}: .* outside of the sandbox") for name in BEFORE),
        *(({}, {name: "x"}, rf"secrets\.{name}: .* outside of the sandbox") for name in BEFORE),
        *(
            ({name: "x"}, {}, "variables: a name has")
            for name in ("", "A B", "1A", "A=B", "A" * 129)
        ),
        *(({}, {"A": name}, "secrets.A: ") for name in ("", "../x", "a/b", ".x", "x" * 64)),
        ({"A": "x\0"}, {}, "variables.A"),
        ({"A": "\ud800"}, {}, "variables.A"),
        ({"A": "x"}, {"A": "a"}, "secrets.A"),
        ({"A": "x" * 40_000}, {}, "variables: 40001 bytes exceed the maximum of 32768"),
        ({f"A{number}": "" for number in range(101)}, {}, "variables, .* 101 exceed .* of 100"),
    ],
)
def test_invalid_variables_and_secrets_are_refused_by_name(variables, secrets, says):
    with pytest.raises(BadEnvironment, match=says):
        check_environment(Environment(variables, secrets))


def test_application_variables_and_any_secret_names_are_allowed():
    check_environment(Environment(dict.fromkeys(OWN, "x")))
    check_environment(Environment(secrets=dict.fromkeys(OWN, "x")))
    for name in NAMES:
        check_environment(Environment(secrets={"A": name}))


@pytest.mark.parametrize("value", VALUES)
def test_a_secret_name_that_looks_like_a_value_is_refused_and_not_shown(value):
    for secrets in ({"TOKEN": value}, {value: value}):
        with pytest.raises(BadEnvironment) as refused:
            check_environment(Environment(secrets=secrets))
        assert value not in str(refused.value)
        assert "VLM_NODE__SECRETS_DIR" in str(refused.value) or value in secrets


def test_the_digest_includes_the_environment_in_any_order():
    assert version_digest(A, Environment()) == A
    one = version_digest(A, Environment({"X": "1", "Y": "2"}))
    assert one == version_digest(A, Environment({"Y": "2", "X": "1"}))
    others = [Environment({"X": "1"}), Environment(secrets={"X": "1", "Y": "2"})]
    assert len({A, one, *(version_digest(A, other) for other in others)}) == 4
