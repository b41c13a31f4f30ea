"""The openai SDK: chat, completions, responses."""

from checks import BASE, KEY, MODEL, QUESTION, WEATHER, check, run
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

client = OpenAI(base_url=BASE, api_key=KEY)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}


class City(BaseModel):
    name: str
    large: bool


@check
def chat():
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


@check
def chat_streamed():
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 0


@check
def chat_parsed():
    answer = client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=City, max_tokens=100)
    assert isinstance(answer.choices[0].message.parsed, City)


@check
def chat_tools():
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls[:1]
    assert call.function.name == "weather"
    assert "city" in call.function.arguments


@check
def completions():
    answer = client.completions.create(model=MODEL, prompt="The capital of France is", max_tokens=4, temperature=0)
    assert answer.choices[0].text


@check
def responses():
    answer = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert "Paris" in answer.output_text


@check
def responses_streamed():
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        kinds = [event.type for event in stream]
        assert "Paris" in stream.get_final_response().output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"


@check
def responses_parsed():
    answer = client.responses.parse(model=MODEL, input=QUESTION, text_format=City, max_output_tokens=100)
    assert isinstance(answer.output_parsed, City)


@check
def responses_continued():
    first = client.responses.create(model=MODEL, input="My name is Ada.", max_output_tokens=8)
    second = client.responses.create(
        model=MODEL, input="What is my name?", previous_response_id=first.id, max_output_tokens=16
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens


@check
def responses_tools():
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    answer = client.responses.create(model=MODEL, input=QUESTION, tools=[tool], tool_choice="required")
    assert any(item.type == "function_call" and item.name == "weather" for item in answer.output)


@check
def errors_are_its_own():
    try:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "word " * 50_000}])
    except BadRequestError as error:
        if error.code == "context_length_exceeded":
            return
        raise
    raise AssertionError("no error")


run()
