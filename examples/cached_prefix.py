"""Ask two questions about one long document; the second finds it in the prefix cache.

Run `make serve`, then in another terminal: python examples/cached_prefix.py [--tokens 16000]
Needs nothing but Python.
"""

import argparse
import json
import time
import urllib.error
import urllib.request
from pathlib import Path


def document(tokens: int, salt: str) -> str:
    """Text of one token per character, as the tiny model's tokenizer counts."""
    text = ""
    while len(text) < tokens:
        text += f"At {len(text)} the quick brown fox of run {salt} jumps over a lazy dog. "
    return text[:tokens]


def ask(
    url: str, model: str, prompt: str, max_tokens: int, policy: str | None, key: str | None
) -> None:
    """Stream one completion and say when its first token came and what was cached."""
    body = {
        **({"vllm_xargs": {"spin_policy": policy}} if policy else {}),
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"content-type": "application/json"}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    started, first, last = time.perf_counter(), None, None
    try:
        response = urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        with error:
            reason = error.read().decode(errors="replace")
        raise SystemExit(f"{error.code} from {url}: {reason}") from None
    except OSError as error:
        raise SystemExit(f"no answer from {url}: {error}; is `make serve` running?") from None
    with response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise SystemExit(f"\n{url} broke off: {event['error'].get('message')}")
            if event["choices"]:
                last = time.perf_counter()
                first = first or last
                print(event["choices"][0]["text"], end="", flush=True)
            if event.get("usage"):
                usage = event["usage"]
    if first is None or last is None:
        raise SystemExit("the server sent no token")
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    per_token = (last - first) / max(usage["completion_tokens"] - 1, 1)
    print(
        f"\n  prompt {usage['prompt_tokens']} tokens, {cached} of them cached; first token after "
        f"{first - started:.2f} s, then {per_token * 1000:.1f} ms each\n"
    )


def main() -> None:
    """Ask twice."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=16000, help="length of the document")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--policy", help="a named one of SPIN's; the default one unless given")
    parser.add_argument("--key-file", type=Path, help="holds a key, where the server has tenants")
    parser.add_argument("--salt", default=str(time.time_ns()), help="makes the document new")
    args = parser.parse_args()
    key = args.key_file.read_text().strip() if args.key_file else None
    text = document(args.tokens, args.salt)
    for question in (" What jumps?", " Over whom does it jump?"):
        ask(args.url, args.model, text + question, args.max_tokens, args.policy, key)


if __name__ == "__main__":
    main()
