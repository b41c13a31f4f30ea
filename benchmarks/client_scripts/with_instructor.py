"""instructor: typed answers by tools, by JSON schema and through responses."""

import instructor
from checks import BASE, KEY, MODEL, QUESTION, check, run
from openai import OpenAI
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": QUESTION}]


class City(BaseModel):
    name: str
    large: bool


def asked(mode):
    client = instructor.from_openai(OpenAI(base_url=BASE, api_key=KEY), mode=mode)
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_model=City, max_tokens=200)
    assert isinstance(answer, City)


@check
def tools():
    asked(instructor.Mode.TOOLS)


@check
def json_schema():
    asked(instructor.Mode.JSON_SCHEMA)


@check
def partial_streamed():
    client = instructor.from_openai(OpenAI(base_url=BASE, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA)
    parts = list(client.create_partial(model=MODEL, messages=MESSAGES, response_model=City, max_tokens=200))
    assert parts[-1].name is not None


run()
