"""litellm: as an OpenAI and as an Anthropic server."""

import litellm
from checks import BASE, KEY, MODEL, QUESTION, URL, WEATHER, check, run

MESSAGES = [{"role": "user", "content": QUESTION}]
TO = {"model": f"openai/{MODEL}", "api_base": BASE, "api_key": KEY, "max_tokens": 64}


@check
def completion():
    assert "Paris" in litellm.completion(messages=MESSAGES, temperature=0, **TO).choices[0].message.content


@check
def completion_streamed():
    chunks = litellm.completion(messages=MESSAGES, temperature=0, stream=True, **TO)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check
def tools():
    tool = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
    answer = litellm.completion(messages=MESSAGES, tools=[tool], tool_choice="required", **TO)
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


@check
def responses():
    assert litellm.responses(input=QUESTION, model=TO["model"], api_base=BASE, api_key=KEY, max_output_tokens=8).output


@check
def as_anthropic():
    answer = litellm.completion(model=f"anthropic/{MODEL}", api_base=URL, api_key=KEY, messages=MESSAGES, max_tokens=8)
    assert answer.choices[0].message.content


@check
def overflow_is_recognised():
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 50_000}], **TO)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no ContextWindowExceededError")


run()
