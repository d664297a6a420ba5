"""Published schemas with conforming and other values: no other value is accepted.

`suite.jsonl` is the JSON Schema Test Suite, draft 2020-12, from the sdist of jsonschema 4.25.1 (json/tests). Each line
is a group: its name, its schema, and values with whether they conform. `make schemas` checks MaskBench.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random

import jsonschema
import pytest

from tests.schemas.checking import Case, Checker, Result

#: Measured: 187 of 438 schemas are accepted. Most others test keywords that are refused.
LEAST_TAKEN = 180
#: Measured: 48 of 534 values that conform to one of them are not accepted: numbers and objects in another spelling
#: (1.0 for 1, another order), properties that the schema does not name, leap seconds, rare addresses, control
#: characters, and values that violate a `format`, which the suite treats as an annotation.
MOST_REJECTED = 50

#: `jsonschema` applies patterns with Python's syntax, and divides floating-point numbers.
NOT_FOR_THE_ORACLE = ("optional/ecmascript-regex", "multipleOf---by small number")


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    made = Checker()
    yield made
    made.close()


@pytest.fixture(scope="module")
def results(checker: Checker) -> list[tuple[Case, Result]]:
    cases = [
        Case(*json.loads(line))
        for line in Path(__file__).with_name("suite.jsonl").read_text().splitlines()
    ]
    return [(case, checker.check(case)) for case in cases]


def values(results: list[tuple[Case, Result]], what: str, *, is_valid: bool) -> list[str]:
    return [
        f"{case.name}: {case.tests[place][1]!r}"
        for case, result in results
        for place in getattr(result, what)
        if case.tests[place][0] is is_valid
    ]


def test_no_nonconforming_value_is_accepted(results):
    assert values(results, "accepted", is_valid=False) == []


def test_most_conforming_values_are_accepted(results):
    assert sum(not result.refusal for _, result in results) >= LEAST_TAKEN
    assert len(values(results, "rejected", is_valid=True)) <= MOST_REJECTED
    assert [case.name for case, result in results if result.failed] == []
    refusals = {result.refusal for _, result in results}
    assert not {"the grammar cannot be read", "these keywords are not supported: some"} & refusals


def test_answers_of_random_tokens_conform(checker, results):
    random, num_answers, wrong = Random(7), 0, []
    for case, result in results:
        if result.refusal or case.name.startswith(NOT_FOR_THE_ORACLE):
            continue
        constraint = checker.compile(case.schema)
        schema = jsonschema.Draft202012Validator(
            case.schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        for _ in range(2):
            answer = checker.draw(constraint, random, most_tokens=120)
            if answer is not None:
                num_answers += 1
                if not schema.is_valid(json.loads(answer)):
                    wrong.append((case.name, answer))
    assert wrong == []
    assert num_answers > 250
