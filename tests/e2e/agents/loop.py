"""Runs an agent of OpenAI's Agents SDK over responses: whole, streamed and continued."""

import asyncio

from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled

ANSWER = "It is 21 degrees and sunny in Paris."


@function_tool
def get_weather(city: str) -> str:
    """Get the weather of a city"""
    return f'{{"temperature": {21 if city == "Paris" else 0}, "sky": "sunny"}}'


async def _run() -> None:
    set_tracing_disabled(disabled=True)
    settings = ModelSettings(temperature=0)
    agent = Agent("weather", model="sluice-tiny", tools=[get_weather], model_settings=settings)
    question = "What is the weather in Paris?"
    whole = await Runner.run(agent, question)
    assert whole.final_output == ANSWER
    streamed = Runner.run_streamed(agent, question)
    events = [event.type async for event in streamed.stream_events()]
    assert "raw_response_event" in events
    assert streamed.final_output == ANSWER
    more = await Runner.run(agent, "And now?", previous_response_id=whole.last_response_id)
    used, before = (it.raw_responses[-1].usage.input_tokens for it in (more, whole))
    assert used > before


asyncio.run(_run())
