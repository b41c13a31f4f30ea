"""openai-agents with its defaults, which is Responses: text, tools, typed output, a stream."""

from agents import Agent, ModelSettings, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from checks import BASE, KEY, MODEL, QUESTION, check, run
from openai import AsyncOpenAI
from pydantic import BaseModel

set_default_openai_client(AsyncOpenAI(base_url=BASE, api_key=KEY))
set_tracing_disabled(True)


class City(BaseModel):
    name: str
    large: bool


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def agent(**more):
    settings = more.pop("model_settings", ModelSettings(max_tokens=200, temperature=0))
    return Agent(name="helper", instructions="Be brief.", model=MODEL, model_settings=settings, **more)


@check
async def text():
    assert (await Runner.run(agent(), QUESTION)).final_output


@check
async def typed_output():
    assert isinstance((await Runner.run(agent(output_type=City), QUESTION)).final_output, City)


@check
async def tools():
    forced = ModelSettings(tool_choice="required", max_tokens=200)
    helper = agent(tools=[weather], tool_use_behavior="stop_on_first_tool", model_settings=forced)
    assert "sunny" in (await Runner.run(helper, QUESTION)).final_output


@check
async def streamed():
    result = Runner.run_streamed(agent(), QUESTION)
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds
    assert result.final_output


run()
