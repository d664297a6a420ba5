"""Answers of the built-in model with JSON schemas, through OpenAI's client."""

import json
import re
from enum import Enum
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from gateway.page import FOLDER
from loadtest.albums import to_png_url
from tests.factories_images import image_part
from tests.integration.fleet_process import SAMPLE


class Color(Enum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Shape(BaseModel):
    color: Color
    place: str = Field(max_length=12)


class Scene(BaseModel):
    shapes: list[Shape] = Field(min_length=1, max_length=2)
    count: int = Field(ge=0, le=9)


PAGE = (FOLDER / "index.html").read_text()
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1, None, "x"]}},
     "required": ["a", "b"], "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5},
     "minItems": 2, "maxItems": 4},
    {"type": "object", "properties": {"day": {"type": "string", "format": "date"},
     "id": {"type": "string", "pattern": "^[a-f0-9]{4}$"}}, "required": ["day", "id"],
     "additionalProperties": False},
    {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"x": {"const": 1}},
     "required": ["x"], "additionalProperties": False}]},
    json.loads(re.findall("""name="schema".*placeholder='(.*?)'""", PAGE)[0]),
]  # fmt: skip


@pytest.fixture(scope="module")
def client(shapes_fleet):
    http = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(
        base_url=f"{shapes_fleet.url}/v1", api_key="unused", max_retries=0, http_client=http
    ) as client:
        yield client


def messages(text: str):
    image = image_part(to_png_url(SAMPLE.read_bytes()))
    return [{"role": "user", "content": [image, {"type": "text", "text": text}]}]


def test_parse_returns_the_pydantic_model(client):
    answer = client.chat.completions.parse(
        model="shapes", messages=messages("Describe the image."), response_format=Scene, n=2,
        temperature=1, seed=5, logprobs=True, top_logprobs=2,
    )  # fmt: skip
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Scene)
        said = "".join(entry.token for entry in choice.logprobs.content)
        assert said.removeprefix(" ").startswith(choice.message.content)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_answers_conform(client, schema):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = client.chat.completions.create(
        model="shapes", messages=messages("What is it?"), response_format=form, n=3,
        temperature=1.5, seed=1, max_tokens=100,
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)


def test_the_error_of_an_unsupported_schema_names_the_field(client):
    schema = {"oneOf": [{"type": "number"}, {"type": "integer"}]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="shapes", messages=messages("?"), response_format=form, stream=True
        )
    assert caught.value.code == "invalid_grammar"
    assert caught.value.param == "response_format.json_schema.schema"
