"""pydantic-ai: its default is Responses; typed output together with tools."""

from checks import BASE, KEY, MODEL, QUESTION, check, run
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

provider = OpenAIProvider(base_url=BASE, api_key=KEY)
SETTINGS = {"max_tokens": 200}


class City(BaseModel):
    name: str
    large: bool


@check
def chat():
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), model_settings={"temperature": 0})
    assert "Paris" in agent.run_sync(QUESTION).output


@check
def responses():
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings={"temperature": 0})
    assert "Paris" in agent.run_sync(QUESTION).output


@check
def typed_output():
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=City, model_settings=SETTINGS)
    assert isinstance(agent.run_sync(QUESTION).output, City)


@check
def typed_output_beside_tools():
    agent = Agent(OpenAIChatModel(MODEL, provider=provider), output_type=NativeOutput(City), model_settings=SETTINGS)

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather of a city."""
        return "sunny"

    assert isinstance(agent.run_sync(QUESTION).output, City)


@check
async def streamed():
    agent = Agent(OpenAIResponsesModel(MODEL, provider=provider), model_settings=SETTINGS)
    async with agent.run_stream(QUESTION) as result:
        assert await result.get_output()


run()
