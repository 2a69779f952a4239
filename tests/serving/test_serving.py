"""vLLM's OpenAI server with its own behaviour, on the tiny model."""

import concurrent.futures
import json
import random
import string
import time
import urllib.error

import pytest
from live_server import LiveServer


def text(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices(string.ascii_lowercase + " ", k=length))


def test_completion_is_deterministic_and_printable(server: LiveServer) -> None:
    first = server.complete("Once upon a time", max_tokens=40)
    assert (
        first["choices"][0]["text"]
        == server.complete("Once upon a time", max_tokens=40)["choices"][0]["text"]
    )
    assert len(first["choices"][0]["text"]) == 40
    assert first["choices"][0]["text"].isprintable()
    assert first["usage"]["prompt_tokens"] == 16
    assert first["usage"]["completion_tokens"] == 40


def test_streamed_chunks_add_up_to_the_whole(server: LiveServer) -> None:
    whole = server.complete("Streaming", max_tokens=24)["choices"][0]["text"]
    body = {"prompt": "Streaming", "max_tokens": 24, "temperature": 0, "stream": True}
    with server.open("/v1/completions", body) as response:
        lines = [line.decode().strip() for line in response if line.strip()]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert len(chunks) > 5
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


def test_chat_answers(server: LiveServer) -> None:
    answer = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0},
    )
    assert len(answer["choices"][0]["message"]["content"]) == 8


@pytest.mark.parametrize("length", [600, 3000])
def test_cached_prefix_is_reported_in_whole_blocks(server: LiveServer, length: int) -> None:
    prompt = text(length, seed=length)
    cold = server.complete(prompt, max_tokens=1)
    warm = server.complete(prompt, max_tokens=1)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    # Blocks of 256 tokens; the last token is always computed.
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == (length - 1) // 256 * 256


def test_seed_gives_the_same_text_however_many_chunks_the_prompt_comes_in(
    server: LiveServer,
) -> None:
    # A CPU's generator cannot be moved back, as vLLM does after every chunk but the last.
    options = {"max_tokens": 8, "temperature": 1.0}
    prompts = [text(5000, seed=11), text(9000, seed=12)]
    cold = [server.complete(p, seed=7, **options) for p in prompts]
    warm = [server.complete(p, seed=7, **options) for p in prompts]
    for chunked, cached in zip(cold, warm, strict=True):
        assert chunked["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cached["usage"]["prompt_tokens_details"]["cached_tokens"] > 4000
        assert chunked["choices"][0]["text"] == cached["choices"][0]["text"]
    other = server.complete(prompts[0], seed=8, **options)
    assert other["choices"][0]["text"] != cold[0]["choices"][0]["text"]


def test_shortest_prompts_are_served_beside_a_long_decode(server: LiveServer) -> None:
    # Prompts of two and three tokens have no compressed slot: vLLM's own indexer stops there.
    def ask(n: int) -> str:
        answer = server.complete("ab?"[:n], max_tokens=3)
        assert answer["usage"]["prompt_tokens"] == n
        return str(answer["choices"][0]["text"])

    expected = {n: ask(n) for n in (1, 2, 3)}
    body = {"prompt": text(2500, seed=9), "max_tokens": 400, "ignore_eos": True, "stream": True}
    with server.open("/v1/completions", body) as long_decode:
        long_decode.readline()
        for n in (2, 3, 1, 2):
            assert ask(n) == expected[n]
        assert b"[DONE]" not in long_decode.read1(), "the long decode ended too early to matter"
        assert b"[DONE]" in long_decode.read()
    assert server.healthy()


@pytest.mark.parametrize("last", ["a", "ab", "abc", "abcd"])
def test_shortest_prompts_are_served_in_a_step_with_a_long_one(
    server: LiveServer, last: str
) -> None:
    # The long prompt's last chunk and the short ones' first share a step.
    prompts = [text(2500 + len(last), seed=7), "xy", text(700, seed=8), last]
    answer = server.post("/v1/completions", {"prompt": prompts, "max_tokens": 2, "temperature": 0})
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_mixed_short_and_long_prompts_leave_it_healthy(server: LiveServer) -> None:
    lengths = [n for i in range(8) for n in (1 + i % 6, 2600 + 300 * i, 2, 3)]
    prompts = [text(n, seed=i) for i, n in enumerate(lengths)]
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda p: server.complete(p, max_tokens=3), prompts))
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == lengths
    assert server.healthy()


def test_wrong_request_is_refused_and_the_server_goes_on(server: LiveServer) -> None:
    for body, code in (({"prompt": "x", "max_tokens": -1}, 400), ({"prompt": "x" * 40_000}, 400)):
        with pytest.raises(urllib.error.HTTPError) as caught:
            server.post("/v1/completions", body)
        assert caught.value.code == code
        caught.value.close()
    assert server.healthy()


def test_hundred_concurrent_requests_with_aborts_leave_it_healthy(server: LiveServer) -> None:
    def ask(i: int) -> str:
        body = {
            "prompt": text(50 + 17 * i, seed=i),
            "max_tokens": 200 if i % 2 else 8,
            "ignore_eos": True,
            "stream": True,
        }
        with server.open("/v1/completions", body) as response:
            if i % 2:
                response.readline()  # hang up after the first chunk
                return "aborted"
            return "done" if b"[DONE]" in response.read() else "cut off"

    with concurrent.futures.ThreadPoolExecutor(100) as pool:
        outcomes = list(pool.map(ask, range(100)))
    assert outcomes.count("done") == outcomes.count("aborted") == 50

    # Aborted requests give everything back: none runs, none waits.
    deadline = time.monotonic() + 60
    while (busy := running_requests(server)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert busy == 0
    assert server.healthy()
    assert len(server.complete("after", max_tokens=4)["choices"][0]["text"]) == 4


def running_requests(server: LiveServer) -> float:
    import urllib.request

    with urllib.request.urlopen(server.url + "/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    found = [float(line.split()[-1]) for line in lines if line.startswith(names)]
    assert len(found) == 2
    return sum(found)
