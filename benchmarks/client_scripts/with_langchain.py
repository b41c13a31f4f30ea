"""langchain-openai: chat model, tools, structured output, both APIs."""

from checks import BASE, KEY, MODEL, QUESTION, WEATHER, check, run
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

chat = ChatOpenAI(model=MODEL, base_url=BASE, api_key=KEY, temperature=0, max_tokens=100)


class City(BaseModel):
    """A city."""

    name: str
    large: bool


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return city


@check
def invoke():
    assert "Paris" in chat.invoke([HumanMessage(QUESTION)]).content


@check
def stream():
    assert "Paris" in "".join(chunk.content for chunk in chat.stream(QUESTION))


@check
def structured_output():
    assert isinstance(chat.with_structured_output(City).invoke(QUESTION), City)


@check
def structured_output_by_function():
    assert isinstance(chat.with_structured_output(City, method="function_calling").invoke(QUESTION), City)


@check
def tools():
    called = chat.bind_tools([weather], tool_choice="weather").invoke(QUESTION).tool_calls
    assert called[0]["name"] == "weather"
    assert WEATHER["required"][0] in called[0]["args"]


@check
def responses_api():
    model = ChatOpenAI(model=MODEL, base_url=BASE, api_key=KEY, use_responses_api=True, max_tokens=16)
    assert model.invoke(QUESTION).content


run()
