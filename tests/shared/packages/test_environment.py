"""Which variables and secrets a deployment may have, and what makes another version of it."""

import msgspec
import pytest

from shared.packages.deployments import Generation, History, Outcome, Spec
from shared.packages.environment import Environment, version_digest

A = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("variables", "secrets", "says"),
    [
        *(
            ({name: "x"}, {}, f"variables.{name}")
            for name in ("PATH", "LD_PRELOAD", "VLM_REDIS_URL", "PYTHONPATH", "ld_audit", "HOME")
        ),
        ({}, {"LD_PRELOAD": "lib"}, "secrets.LD_PRELOAD"),
        *(
            ({name: "x"}, {}, "variables: name each")
            for name in ("", "A B", "1A", "A=B", "A" * 129)
        ),
        *(({}, {"A": name}, "secrets.A: name") for name in ("", "../x", "a/b", ".x", "x" * 129)),
        ({"A": "x\0"}, {}, "variables.A"),
        ({"A": "\ud800"}, {}, "variables.A"),
        ({"A": "x"}, {"A": "a"}, "secrets.A"),
        ({"A": "x" * 40_000}, {}, "32768"),
        ({f"A{number}": "" for number in range(101)}, {}, "100"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(variables, secrets, says):
    with pytest.raises(ValueError, match=says):
        Environment(variables, secrets)


def test_an_environment_makes_another_version_of_a_package_in_whatever_order_it_is_written():
    assert version_digest(A, Environment()) == A
    one = version_digest(A, Environment({"X": "1", "Y": "2"}))
    assert one == version_digest(A, Environment({"Y": "2", "X": "1"}))
    others = [Environment({"X": "1"}), Environment(secrets={"X": "1", "Y": "2"})]
    assert len({A, one, *(version_digest(A, other) for other in others)}) == 4


def test_a_rollback_leads_to_the_environment_before():
    generations = [
        Generation("n", number, A, Spec(), environment=Environment({"X": str(number)}, {"S": "s"}))
        for number in (1, 2)
    ]
    history = History({g.number: g for g in generations}, {n: Outcome("active") for n in (1, 2)})
    before = history.before(generations[1].version)
    assert before is not None
    assert before == generations[0]
    back = history.back_to(before, Spec(min_instances=3))
    assert (back.number, back.digest, back.environment) == (3, A, generations[0].environment)
    assert back.version == generations[0].version
    assert msgspec.json.decode(msgspec.json.encode(back), type=Generation) == back
