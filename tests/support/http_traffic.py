"""Clients of the gateway, in threads: each sends requests and checks the answers."""

import http.client
import json
import threading
import time
from collections import Counter

ATTEMPTS = 3
"""As clients of OpenAI's do: a connection that breaks before an answer is tried again."""


class HttpTraffic:
    """Closed-loop clients of one gateway; `lost` lists requests that failed, as messages.

    Tokens are greedy, so all answers to one prompt must be alike, whatever happens to the pool.
    """

    def __init__(self, host, port, prompts, *, num_clients, max_tokens):
        self.lost = []
        self.answered = Counter()
        self._host, self._port, self._max_tokens = host, port, max_tokens
        self._prompts = prompts
        self._domain = next(iter(prompts))
        self._answers = {}
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(number,)) for number in range(num_clients)
        ]

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.end()

    def end(self):
        """Let what was asked be answered, and ask no more."""
        self._end.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=120)

    def shift_to(self, domain):
        """Let requests from now on be of this domain."""
        self._domain = domain

    @property
    def num_answered(self):
        return sum(self.answered.values())

    def _ask_on(self, number):
        turn = number
        while not self._end.is_set():
            domain = self._domain
            prompt = self._prompts[domain][turn % len(self._prompts[domain])]
            turn += 1
            try:
                tokens = self._ask(prompt)
            except (OSError, ValueError, LookupError, http.client.HTTPException) as error:
                self.lost.append(f"{time.strftime('%X')} {domain}: {error!r}")
                continue
            with self._lock:
                first = self._answers.setdefault(prompt, tokens)
                if tokens != first:
                    self.lost.append(f"{domain}: other tokens than before for {prompt!r}")
                self.answered[domain] += 1

    def _ask(self, prompt):
        for attempt in range(ATTEMPTS):
            try:
                return self._ask_once(prompt)
            except (ConnectionError, http.client.BadStatusLine):
                if attempt == ATTEMPTS - 1:
                    raise
                time.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")

    def _ask_once(self, prompt):
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": self._max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        connection = http.client.HTTPConnection(self._host, self._port, timeout=100)
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(f"{answer.status}: {text[:300]!r}")
        tokens = tuple(json.loads(text)["choices"][0]["token_ids"])
        if len(tokens) != self._max_tokens:
            raise ValueError(f"{len(tokens)} tokens, not {self._max_tokens}")
        return tokens
