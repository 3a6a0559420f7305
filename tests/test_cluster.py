"""Replicas on the nodes of a Ray cluster: three nodes' worth of Ray on this machine."""

import json
import os
import re
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any

import httpx
import pytest
from models import PATIENCE, until
from serving import events_of

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra [ray]"),
]

KEY = "a-key-of-this-cluster"
COMPLETE, RESPOND = "/v1/completions", "/v1/responses"
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "stream": True}
PAUSE = 0.2  # seconds between two questions to a busy cluster
# A place that a lost node leaves is waited for as long as an answer may take.
SMALL = {"device": "cpu", "num_ingress": 3, "max_num_seqs": 8, "grace": 20}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def in_time(condition: Callable[[], object]) -> None:
    """`until`, for what takes Ray some work to say."""

    def holds() -> bool:
        time.sleep(PAUSE)
        return bool(condition())

    until(holds)


class Nodes:
    """A cluster of three nodes with the application on it."""

    def __init__(self) -> None:
        import ray
        from ray import serve
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 2, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.workers = [self.cluster.add_node(num_cpus=2) for _ in range(2)]
        ray.init(address=self.cluster.address, log_to_driver=False)
        port = free_port()
        serve.start(
            proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port}
        )
        headers = {"authorization": f"Bearer {KEY}"}
        url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=url, timeout=PATIENCE, headers=headers)

    def deploy(self, **arguments: Any) -> None:
        """Put the application there, or change it, and wait until it runs."""
        from ray import serve

        from simplellm.server.cluster.deploy import Arguments, app

        serve.run(app(Arguments(**{**SMALL, **arguments})))

    def kill(self, node: Any) -> None:
        """End all processes of a node at once, as when its machine fails."""
        from ray._private.state import actors

        on_it = [a for a in actors().values() if a["Address"]["NodeID"] == node.node_id]
        for pid in [actor["Pid"] for actor in on_it if actor["State"] == "ALIVE"]:
            os.kill(pid, signal.SIGKILL)
        self.cluster.remove_node(node, allow_graceful=False)

    def where(self) -> dict[str, str]:
        """The replicas that live, each with its node."""
        from ray._private.state import actors

        found = {}
        for actor in actors().values():
            *_, name = actor["Name"].rpartition("#EngineReplica#")
            if "#EngineReplica#" in actor["Name"] and actor["State"] == "ALIVE":
                found[name] = actor["Address"]["NodeID"]
        return found

    def generated(self) -> dict[str, float]:
        """The tokens that each replica has generated, as metrics say."""
        name = r'^simplellm:generation_tokens_total{engine="([^"]+)",.*} (\S+)$'
        found = re.findall(name, self.client.get("/metrics").text, re.MULTILINE)
        return {replica: float(count) for replica, count in found}

    def computed(self, body: dict[str, Any]) -> list[str]:
        """The replicas that have had all prefixes of a body's prompt."""
        from ray import serve

        from simplellm.server.cluster.ingress import prefix_digests

        digests = prefix_digests(json.dumps(body).encode())
        shared = serve.get_deployment_handle("SharedState", "default")
        matches = shared.match.remote(digests).result(timeout_s=30)
        return [name for name, count in matches.items() if count == len(digests) > 0]

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.client.post(COMPLETE, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def stream(
        self, body: dict[str, Any], begun: threading.Event | None = None
    ) -> list[dict[str, Any]]:
        """The events of a stream, however it ends; ``begun`` is set at the first."""
        text = ""
        with self.client.stream("POST", COMPLETE, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for part in answer.iter_text():
                text += part
                if begun is not None:
                    begun.set()
        return events_of(text, done="[DONE]" in text)

    def respond(self, text: str, **options: Any) -> httpx.Response:
        body = {"input": text, "max_output_tokens": 8, **options}
        return self.client.post(RESPOND, json=body)

    def close(self) -> None:
        import ray
        from ray import serve

        self.client.close()
        serve.shutdown()
        ray.shutdown()
        self.cluster.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray's own links ask for a token, too. Ray reads this when it is imported.
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        patch.setenv("SIMPLELLM_API_KEY", KEY)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        found = Nodes()
        try:
            found.deploy(min_replicas=3, max_replicas=3)
            yield found
        finally:
            found.close()


def prompt(number: int, tail: str = "") -> str:
    """A prompt that has no beginning in common with those of other numbers."""
    return f"{number}. " + " ".join(str(number * i) for i in range(1, 200)) + tail


def whole(events: list[dict[str, Any]]) -> bool:
    """Whether a stream has all its tokens."""
    return (
        "choices" in events[-1]
        and events[-1]["choices"][0]["finish_reason"] == "length"
    )


def test_a_key_is_asked_for(nodes: Nodes) -> None:
    answer = httpx.get(f"{nodes.client.base_url}/v1/models", timeout=PATIENCE)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert nodes.client.get("/v1/models").json()["data"][0]["id"] == "simplellm"
    wrong = nodes.client.post(COMPLETE, content=b"{", headers={"content-type": "x"})
    assert wrong.status_code == 415


def test_metrics_are_those_of_all_replicas(nodes: Nodes) -> None:
    """Each by its name, whoever answers."""
    in_time(lambda: nodes.generated().keys() == nodes.where().keys())
    assert not any(nodes.generated().values())
    bodies = [{"prompt": prompt(n), "max_tokens": 7} for n in range(60, 69)]
    answers = [nodes.complete(body) for body in bodies]
    count = sum(answer["usage"]["completion_tokens"] for answer in answers)
    in_time(lambda: sum(nodes.generated().values()) == count)
    assert sum(tokens > 0 for tokens in nodes.generated().values()) > 1
    text = nodes.client.get("/metrics").text
    assert text.count("# HELP simplellm:generation_tokens_total ") == 1


def test_requests_on_all_nodes(nodes: Nodes) -> None:
    where = nodes.where()
    assert len({*where.values()}) == len(where) == 3
    bodies = [{"prompt": prompt(n), "max_tokens": 40} for n in range(1, 10)]
    with ThreadPoolExecutor(9) as pool:
        answers = [*pool.map(nodes.complete, bodies)]
    assert all(answer["usage"]["completion_tokens"] for answer in answers)
    computed = [nodes.computed(body) for body in bodies]
    assert {name for names in computed for name in names} == {*where}


def test_equal_beginnings_together(nodes: Nodes) -> None:
    for number in (20, 21, 22):
        for tail in ("", " and", " then", " so"):
            body = {"prompt": prompt(number, tail), "max_tokens": 1}
            usage = nodes.complete(body)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 100
        assert len(nodes.computed(body)) == 1


def test_streams_are_whole(nodes: Nodes) -> None:
    """Each has as many tokens as were asked for, in the same order as in one piece."""
    bodies = [{"prompt": prompt(n), "seed": n, **LONG} for n in (1, 2, 3, 4)]
    bodies = [{**body, "max_tokens": 60, "return_token_ids": True} for body in bodies]
    with ThreadPoolExecutor(4) as pool:
        streams = [*pool.map(nodes.stream, bodies)]
    for body, events in zip(bodies, streams, strict=True):
        tokens = [i for event in events for i in event["choices"][0]["token_ids"]]
        assert whole(events) and len(tokens) == 60
        answer = nodes.complete({**body, "stream": False})
        assert answer["choices"][0]["token_ids"] == tokens


def test_whoever_leaves_ends_the_request(nodes: Nodes) -> None:
    body = {"prompt": prompt(5), **LONG, "max_tokens": 2000}
    with nodes.client.stream("POST", COMPLETE, json=body) as answer:
        next(answer.iter_raw())
    line = 'finished_reason="abort"'
    in_time(lambda: line in nodes.client.get("/metrics").text)


def test_a_response_is_found_wherever_it_was_written(nodes: Nodes) -> None:
    """Also while it is being written; and it can be ended from anywhere."""
    first = nodes.respond("What is 3 + 4?").json()
    for _ in range(6):  # whichever replica is asked
        assert nodes.client.get(f"{RESPOND}/{first['id']}").json() == first
    second = nodes.respond("And 5 more?", previous_response_id=first["id"]).json()
    items = nodes.client.get(f"{RESPOND}/{second['id']}/input_items").json()["data"]
    assert first["output"][0]["id"] in [item["id"] for item in items]
    running = nodes.respond("Count.", background=True, max_output_tokens=2000).json()
    assert running["status"] == "in_progress"
    for _ in range(6):
        now = nodes.client.get(f"{RESPOND}/{running['id']}").json()
        assert now["status"] in ("in_progress", "completed", "incomplete")
    ended = nodes.client.post(f"{RESPOND}/{running['id']}/cancel").json()
    assert ended["status"] in ("cancelled", "completed", "incomplete")
    assert nodes.client.delete(f"{RESPOND}/{first['id']}").json()["deleted"]
    assert nodes.client.get(f"{RESPOND}/{first['id']}").status_code == 404


def test_a_node_is_killed_under_load(nodes: Nodes) -> None:
    """Its streams end with an error; others are whole; what was stored is there."""
    first = nodes.respond("What is 3 + 4?").json()
    where, victim = nodes.where(), nodes.workers.pop()
    lost = {name for name, node in where.items() if node == victim.node_id}
    assert len(lost) == 1
    bodies = [{"prompt": prompt(n), **LONG} for n in range(30, 39)]
    with ThreadPoolExecutor(9) as pool:
        begun = [threading.Event() for _ in bodies]
        streams = [*map(pool.submit, [nodes.stream] * 9, bodies, begun)]
        assert all(one.wait(PATIENCE) for one in begun)
        places = [nodes.computed(body) for body in bodies]
        nodes.kill(victim)
        ends = [stream.result(PATIENCE) for stream in streams]
    on_victim = [place in lost for (place, *_) in places]
    assert 0 < sum(on_victim) < 9
    assert ["error" in events[-1] for events in ends] == on_victim
    assert all(whole(e) for e, there in zip(ends, on_victim, strict=True) if not there)
    second = nodes.respond("And 5 more?", previous_response_id=first["id"])
    assert second.status_code == 200
    in_time(lambda: len({*nodes.where()} - lost) == 3)  # another one came


def test_up_and_down(nodes: Nodes) -> None:
    """More replicas come with the load; those that go finish what they compute."""
    nodes.deploy(
        num_ingress=2,  # as many as nodes are left
        min_replicas=1,
        max_replicas=3,
        target_ongoing_requests=2,
        upscale_delay_s=1,
        downscale_delay_s=2,
    )
    in_time(lambda: len(nodes.where()) == 1)
    over = threading.Event()

    def load(number: int) -> list[bool]:
        found = []
        while not over.is_set():
            found.append(whole(nodes.stream({"prompt": prompt(number), **LONG})))
        return found

    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load, number) for number in range(40, 48)]
        in_time(lambda: len(nodes.where()) == 3)
        over.set()
        assert all(all(one.result(PATIENCE)) for one in loads)
    in_time(lambda: len(nodes.where()) == 1)


def test_what_cannot_be_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known before anything is on a node."""
    from simplellm.server.cluster.deploy import Arguments, app

    monkeypatch.delenv("SIMPLELLM_API_KEY", raising=False)
    with pytest.raises(ValueError, match="SIMPLELLM_API_KEY is not set"):
        app(Arguments.model_validate({}))
    with pytest.raises(ValueError, match=r"\['max_nun_seqs'\], which nobody knows"):
        app(Arguments.model_validate({"max_nun_seqs": 8}))
    with pytest.raises(ValueError, match="tensor_parallel_size is 0"):
        app(Arguments.model_validate({"tensor_parallel_size": "0"}))
