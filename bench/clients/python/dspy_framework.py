import asyncio

from checks import ASKED, CITIES, MODEL, V1, City, absent, check, was_called, weather

try:
    import dspy
    from dspy import lm15
except ImportError as error:
    absent(error)

# What a model of another name can do is in no catalogue of DSPy's, so it is stated.
own = lm15.ProviderDefinition.chat(
    lm15.AccessPolicy(provider="tideway", base_url=V1),
    compat=lm15.OpenAIChatCompat.preset("vllm"),
    placeholder_key="none",
)
lm15.register_provider(own, supports=lm15.ModelSupport(function_calling=True, response_schema=True))
lm = dspy.LM(f"tideway/{MODEL}", max_tokens=200, cache=False, num_retries=0)
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
    choice = {"tool_choice": "required", "parallel_tool_calls": False}
    with dspy.context(adapter=dspy.JSONAdapter(use_native_function_calling=True)):
        found = dspy.Predict(Call)(question=ASKED, tools=[dspy.Tool(weather)], config=choice)
    for call in found.calls.tool_calls:
        weather(**call.args)
    was_called()


def structured():
    assert dspy.Predict(Choose)(question=ASKED).city in CITIES


check("dspy", stream=stream, tool=tool, structured=structured)
