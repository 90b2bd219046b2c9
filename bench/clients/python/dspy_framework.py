import asyncio

from checks import ASKED, CITIES, MODEL, V1, City, absent, check, was_called, weather

try:
    import dspy
except ImportError as error:
    absent(error)

lm = dspy.LM(f"openai/{MODEL}", api_base=V1, api_key="none", max_tokens=200, cache=False, num_retries=0)
dspy.configure(lm=lm, adapter=dspy.JSONAdapter())


class Choose(dspy.Signature):
    question: str = dspy.InputField()
    city: City = dspy.OutputField()


class Call(dspy.Signature):
    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


def stream():
    async def run():
        program = dspy.streamify(dspy.Predict(Choose))
        return [piece async for piece in program(question=ASKED)]

    assert asyncio.run(run())[-1].city in CITIES


def tool():
    native = dspy.JSONAdapter(use_native_function_calling=True)
    with dspy.context(lm=lm.copy(tool_choice="required"), adapter=native):
        found = dspy.Predict(Call)(question=ASKED, tools=[dspy.Tool(weather)])
    for call in found.calls.tool_calls:
        weather(**call.args)
    was_called()


def structured():
    assert dspy.Predict(Choose)(question=ASKED).city in CITIES


check("dspy", stream=stream, tool=tool, structured=structured)
