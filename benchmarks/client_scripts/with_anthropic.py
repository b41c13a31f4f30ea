"""The anthropic SDK."""

from anthropic import Anthropic
from checks import KEY, MODEL, QUESTION, URL, WEATHER, check, run

client = Anthropic(base_url=URL, api_key=KEY)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOL = {"name": "weather", "input_schema": WEATHER}


@check
def messages():
    answer = client.messages.create(model=MODEL, max_tokens=16, messages=MESSAGES, system="Be brief.")
    assert answer.content[0].type == "text"
    assert answer.usage.output_tokens > 0


@check
def messages_streamed():
    with client.messages.stream(model=MODEL, max_tokens=16, messages=MESSAGES) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text


@check
def tools_and_their_results():
    first = client.messages.create(
        model=MODEL, max_tokens=200, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "any"}
    )
    call = next(block for block in first.content if block.type == "tool_use")
    assert first.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model=MODEL, max_tokens=8, messages=turns, tools=[TOOL]).content


@check
def count_tokens():
    assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 5


run()
