"""OpenAI's endpoints of the embedded server, asked by OpenAI's own client.

Why it must hold: people point agents and evaluation harnesses at the URL. What is sampled is held to /generate, whose
contract other tests have; a stream is held to the whole reply, and a chat to the completion of what transformers makes
of its messages. The model is random and its tokens are bytes, so nearly every sample has unfinished characters. Not
covered: other clients, TLS, load.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from rollout.wire import endpoints
from tests.support.embedded_fixtures import QWEN, oracle, save, served, service
from tests.support.refusals import check_refusal

pytestmark = pytest.mark.slow  # the client asks `uname`; a tokenizer's template is tried in a process
TEMPLATE = """{% if tools %}<tools>{{ tools | tojson }}</tools>
<tool_call>
{"name": ..., "arguments": ...}</tool_call>
{% endif %}{% for m in messages %}{{ m.role }}{{ mark }}: {{ m.content }}{% for c in m.tool_calls or [] %}\
{{ c.function.name }}({{ c.function.arguments.a }}){% endfor %}
{% endfor %}assistant:"""
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
EOS = 256


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("home") / "tiny-bytes"
    model = oracle(base=QWEN | {"vocab_size": 320, "eos_token_id": EOS})
    save(model, where)
    alphabet = {name: i for i, name in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(where / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (where / "tokenizer_config.json").write_text(json.dumps(settings))
    return where


@pytest.fixture(scope="module")
def url(path: Path) -> Iterator[str]:
    with served(service(path)) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False) as plain:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=plain, timeout=60)


def complete(client: openai.OpenAI, prompt: Any = "two and two", **keys: Any) -> Any:
    return client.completions.create(**({"model": "tiny-bytes", "prompt": prompt, "max_tokens": 24} | keys))


def chat(client: openai.OpenAI, *messages: Any, **keys: Any) -> Any:
    said = list(messages) or [{"role": "user", "content": "two and two"}]
    return client.chat.completions.create(**({"model": "tiny-bytes", "messages": said, "max_tokens": 24} | keys))


def sampled(url: str, path: Path, text: str, **params: Any) -> tuple[list[int], list[float]]:
    """Token ids and log-probs of /generate."""
    body = {"text": text, "return_logprob": True, "sampling_params": {"max_new_tokens": 24} | params}
    meta = httpx.post(f"{url}/generate", json=body, trust_env=False, timeout=60).json()["meta_info"]
    return [t for _, t, _ in meta["output_token_logprobs"]], [p for p, _, _ in meta["output_token_logprobs"]]


def test_the_model_is_listed_under_its_name(client: openai.OpenAI, path: Path, url: str) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny-bytes" == client.models.retrieve("tiny-bytes").id
    assert model.to_dict()["max_model_len"] == 256
    assert complete(client, model=str(path), max_tokens=1).usage.completion_tokens == 1  # as SGLang's clients name it
    for ask in (lambda: client.models.retrieve("gpt-4"), lambda: complete(client, model="gpt-4")):
        with pytest.raises(openai.NotFoundError) as refused:
            ask()
        assert refused.value.code == "model_not_found" and refused.value.param == "model"
        check_refusal(refused.value.body["message"], "'gpt-4'", "'tiny-bytes'")  # type: ignore[index]
    page = httpx.get(url, trust_env=False).text
    routes = {v for n, v in vars(endpoints).items() if n.startswith("OPENAI_")}
    assert len(routes) == 3 and all(route in page for route in (*routes, "/generate"))
    assert httpx.get(f"{url}/docs", trust_env=False).text == page


def test_the_schema_describes_requests_and_replies(client: openai.OpenAI, url: str) -> None:
    """A chat has keys of OpenAI's own client, SGLang's among them marked by its reference; that what the schema calls
    invalid is refused is tests/fuzz/test_server.py's."""
    document = httpx.get(f"{url}/openapi.json", trust_env=False).json()
    document["$schema"] = "https://json-schema.org/draft/2020-12/schema"

    def validate(body: Any, name: str) -> None:
        jsonschema.validate(body, document | {"$ref": f"#/components/schemas/{name}"})

    routes = {v for n, v in vars(endpoints).items() if n.startswith("OPENAI_")}
    assert routes <= document["paths"].keys()
    keys = set(document["components"]["schemas"]["ChatBody"]["properties"])
    own = {"top_k", "min_p", "stop_token_ids", "ignore_eos", "chat_template_kwargs"}
    assert keys - set(CompletionCreateParamsBase.__annotations__) == own | {"stream"}
    validate(client.models.list().to_dict(), "Models")
    validate(client.models.retrieve("tiny-bytes").to_dict(), "Model")
    validate(complete(client, ["one", "two"], n=2, logprobs=2).to_dict(), "Completion")
    validate(chat(client, logprobs=True).to_dict(), "ChatCompletion")
    asked = {"model": "tiny-bytes", "prompt": ["one", "two"], "stop": ["a"], "seed": None, "user": "me"}
    validate(asked, "CompletionBody")
    for wrong in ({"model": "gpt-4"}, {"echo": True}, {"promt": "x"}, {"prompt": None}, {"stop": ["a"] * 17}):
        with pytest.raises(jsonschema.ValidationError):
            validate(asked | wrong, "CompletionBody")
        assert httpx.post(f"{url}/v1/completions", json=asked | wrong, trust_env=False).status_code in (400, 404)


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.7, "top_p": 0.9, "seed": 11}, {"seed": 4}])
def test_what_is_sampled_is_what_generate_samples(
    client: openai.OpenAI, url: str, path: Path, params: dict[str, Any]
) -> None:
    own = {"sampling_seed" if k == "seed" else k: v for k, v in params.items()}
    ids, logprobs = sampled(url, path, "two and two", **own)
    got = complete(client, logprobs=3, **params)
    (choice,) = got.choices
    assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=1e-5)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    ended = ids[-1] == EOS
    text = tokenizer.decode(ids[:-1] if ended else ids)
    assert choice.text in (text, text.removesuffix("\ufffd"))
    assert choice.finish_reason == ("stop" if ended else "length")
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len("two and two"), len(ids))
    for own_p, top in zip(choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True):
        assert len(top) == 3 and own_p <= max(top.values()) + 1e-5
    if params.get("temperature") == 0:
        best = [max(top.values()) for top in choice.logprobs.top_logprobs]
        assert best == pytest.approx(logprobs, abs=1e-5)


def test_samples_of_a_prompt_differ_and_come_again_by_their_seed(client: openai.OpenAI) -> None:
    first, again, other = (complete(client, ["one", "two"], n=3, seed=s) for s in (5, 5, 6))
    texts = [[c.text for c in reply.choices] for reply in (first, again, other)]
    assert len(texts[0]) == 6 == len(set(texts[0])) and texts[0] == texts[1] != texts[2]
    assert [c.index for c in first.choices] == list(range(6))
    alone = complete(client, "two", n=3, seed=5)
    assert [c.text for c in alone.choices] == texts[0][3:]


@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_is_the_whole_reply(client: openai.OpenAI, seed: int) -> None:
    """In pieces of whole characters, without a part of the stop string, which comes in several tokens."""
    free = complete(client, n=2, seed=seed).choices[0].text
    stop = [free[9:12], "never"]
    keys = {"n": 2, "seed": seed, "stop": stop, "logprobs": 2}
    whole, stream = (
        complete(client, **keys),
        complete(client, stream=True, stream_options={"include_usage": True}, **keys),
    )
    chunks = list(stream)
    last = chunks.pop()
    assert last.choices == [] and last.usage == whole.usage and {c.id for c in chunks} == {last.id}
    for i, choice in enumerate(whole.choices):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == i]
        assert len(mine) > 3 and "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine][-1] == choice.finish_reason and not any(
            c.finish_reason for c in mine[:-1]
        )
        for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [x for c in mine for x in getattr(c.logprobs, key)] == getattr(choice.logprobs, key)
    cut = whole.choices[0]
    assert cut.text == free[: free.index(stop[0])] and cut.finish_reason == "stop"
    assert whole.usage.completion_tokens < 48


def test_a_sample_ends_with_the_token_that_completes_its_stop_string(client: openai.OpenAI) -> None:
    free = complete(client, seed=3, logprobs=0)
    names = free.choices[0].logprobs.tokens
    at = next(i for i in range(2, len(names)) if all(len(n) == 1 for n in names[i - 1 : i + 1]))
    got = complete(client, seed=3, stop=names[at - 1] + names[at], logprobs=0)
    tokens = got.choices[0].logprobs.tokens
    assert got.choices[0].finish_reason == "stop" and names[: len(tokens)] == tokens
    assert len(tokens) <= at - 1 < got.usage.completion_tokens <= at + 1
    special = complete(client, seed=3, stop="<|end|>", extra_body={"ignore_eos": True})
    assert special.choices[0].text == free.choices[0].text  # not ended by it, as the model never samples it here


def test_a_stop_token_is_no_text(client: openai.OpenAI, url: str, path: Path) -> None:
    ids, _ = sampled(url, path, "two and two", sampling_seed=9)
    got = complete(client, seed=9, extra_body={"stop_token_ids": [ids[7]]})
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.completion_tokens == ids.index(ids[7]) + 1
    text = Tokenizer.from_file(str(path / "tokenizer.json")).decode(ids[: ids.index(ids[7])])
    assert got.choices[0].text in (text, text.removesuffix("\ufffd"))


def test_a_chat_is_the_completion_of_its_template(client: openai.OpenAI, path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(path)
    messages: list[Any] = [
        {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": "1+1?", "name": None},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "x", "content": "2"},
    ]
    plain = [{"role": "system", "content": "be brief"}, messages[1]]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    plain += [{"role": "assistant", "content": "", "tool_calls": [call]}, messages[3]]
    for tools in ([], [TOOL]):
        prompt = tokenizer.apply_chat_template(
            plain, tools=tools or None, tokenize=False, add_generation_prompt=True, mark="!"
        )
        assert ("add(1)" in prompt) and ("<tools>" in prompt) == bool(tools) and "user!" in prompt
        more = {"tools": tools} if tools else {}
        keys: dict[str, Any] = {"seed": 2, "n": 2, "stop": ["zz"]}
        got = chat(
            client,
            *messages,
            logprobs=True,
            top_logprobs=2,
            extra_body={"chat_template_kwargs": {"mark": "!"}},
            **keys,
            **more,
        )
        want = complete(client, prompt, logprobs=2, **keys)
        assert got.usage.prompt_tokens == want.usage.prompt_tokens == len(tokenizer.encode(prompt))
        for ours, theirs in zip(got.choices, want.choices, strict=True):
            assert ours.message.content == theirs.text and ours.finish_reason == theirs.finish_reason
            assert [t.logprob for t in ours.logprobs.content] == theirs.logprobs.token_logprobs
            assert all(len(t.top_logprobs) == 2 for t in ours.logprobs.content)
            data = b"".join(bytes(t.bytes) for t in ours.logprobs.content)
            assert data.decode("utf-8", "replace").startswith(ours.message.content)
    long = chat(client, {"role": "user", "content": "x"}, max_tokens=None, seed=1, extra_body={"ignore_eos": True})
    assert long.usage.total_tokens == 256  # the context length


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = chat(client, seed=8, tools=[TOOL]).choices[0]
    chunks = [c.choices[0] for c in chat(client, seed=8, tools=[TOOL], stream=True)]
    assert chunks[0].delta.role == "assistant"
    assert "".join(c.delta.content or "" for c in chunks) == whole.message.content
    assert chunks[-1].finish_reason == whole.finish_reason


def test_a_client_that_leaves_ends_its_samples(client: openai.OpenAI, url: str) -> None:
    stream = complete(client, max_tokens=240, n=64, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert _running(url) > 0
    stream.close()
    until = time.monotonic() + 20
    while _running(url) and time.monotonic() < until:
        time.sleep(0.02)
    state = httpx.get(f"{url}/server_info", trust_env=False).json()["internal_states"][0]
    assert _running(url) == 0 and state["generated_tokens"] > 0


def _running(url: str) -> int:
    state = httpx.get(f"{url}/server_info", trust_env=False).json()["internal_states"][0]
    return int(state["running"])


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"temperature": -1.0}, ("temperature", "-1.0", "at least 0")),
        ({"n": 0}, ("n = 0", "at least 1")),
        ({"presence_penalty": 0.5}, ("presence_penalty", "0.5", "not supported")),
        ({"logit_bias": {"5": 1}}, ("logit_bias", "not supported")),
        ({"echo": True}, ("echo = True", "not supported")),
        ({"max_tokens": 300}, ("300", "311", "256")),
        ({"stop": ["a"] * 17}, ("stop", "17", "16")),
        ({"stop": ""}, ("stop", "empty")),
        ({"stop": 5}, ("stop", "5")),
        ({"prompt": ""}, ("prompt", "no tokens")),
        ({"prompt": [5, 400]}, ("400", "320")),
        ({"prompt": []}, ("prompt", "at least 1")),
        ({"extra_body": {"top_k": 0}}, ("top_k", "0")),
        ({"extra_body": {"temprature": 1}}, ("temprature", "temperature")),
        ({"stream_options": {"include_usage": True}}, ("stream_options", "stream = true")),
        ({"stream": True, "max_tokens": 300}, ("300", "311", "256")),
        ({"logprobs": 21}, ("logprobs", "21", "20")),
    ],
)
def test_a_completion_that_cannot_be_served_is_one_sentence(
    client: openai.OpenAI, keys: dict[str, Any], facts: tuple[object, ...]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, **keys)
    assert refused.value.type == "invalid_request_error"
    check_refusal(refused.value.body["message"], *facts)  # type: ignore[index]


@pytest.mark.parametrize(
    ("keys", "facts"),
    [
        ({"messages": [{"role": "me", "content": ""}]}, ("messages[0].role", "'me'")),
        ({"messages": [{"role": "user"}]}, ("messages[0]", "content")),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, ("messages[0]", "image_url", "text")),
        ({"tool_choice": "required", "tools": [TOOL]}, ("tool_choice", "required", "auto")),
        ({"tools": [{"type": "function"}]}, ("tools[0]", "name")),
        ({"response_format": {"type": "json_object"}}, ("response_format", "json_object")),
        ({"top_logprobs": 2}, ("top_logprobs", "logprobs = true")),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}},
            ("chat_template_kwargs.chat_template",),
        ),
    ],
)
def test_a_chat_that_cannot_be_served_is_one_sentence(
    client: openai.OpenAI, keys: dict[str, Any], facts: tuple[object, ...]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **keys)
    check_refusal(refused.value.body["message"], *facts)  # type: ignore[index]


def test_errors_of_these_routes_have_openai_s_shape(url: str) -> None:
    for method, route, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/completions", 400),
    ):
        reply = httpx.request(method, url + route, content=b"{", trust_env=False)
        assert reply.status_code == status and reply.json()["error"].keys() == {"message", "type", "param", "code"}
    assert httpx.get(f"{url}/nothing", trust_env=False).json()["error"].keys() == {"message"}  # SGLang's


@pytest.mark.parametrize(
    ("route", "keys"),
    [
        (endpoints.OPENAI_COMPLETIONS, {"prompt": prompt})
        for prompt in ({"a": 1}, [[1], ["a"]], [["a"]], [True], [[]], ["a", 1], 5, "\\ud800", [-1], [2**40], [""])
    ]
    + [
        (endpoints.OPENAI_CHAT, {"messages": messages})
        for messages in (
            [5],
            [{}],
            [{"role": ["user"], "content": "a"}],
            [{"role": "user", "content": 5}],
            [{"role": "assistant", "tool_calls": [[]]}],
            [{"role": "user", "content": "a", "image": 1}],
        )
    ]
    + [
        (endpoints.OPENAI_CHAT, {"messages": [{"role": "user", "content": "a"}]} | more)
        for more in (
            {"tools": [5]},
            {"tools": [{"type": "function", "function": {"name": 5}}]},
            {"chat_template_kwargs": {"self": 1}},
            {"stop": [["a"]]},
            {"stream_options": {"usage": 1}, "stream": True},
        )
    ],
)
def test_what_is_no_request_is_a_sentence_and_not_the_server_s_fault(
    url: str, route: str, keys: dict[str, Any]
) -> None:
    body = json.dumps({"model": "tiny-bytes"} | keys).replace("\\\\ud800", "\\ud800")  # half of a character
    reply = httpx.post(url + route, content=body.encode(), trust_env=False, timeout=60)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["message"] and "\n" not in error["message"]
