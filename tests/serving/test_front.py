"""One front before a prefill and a decode server: answers are those of one engine, whatever happens to the two."""

import concurrent.futures
import contextlib
import http.server
import json
import socket
import threading
import time

import httpx
import pytest
from engine_servers import TOKENIZER, VOCAB, expected, front_of, make_engine, start_server
from slow_network import FAIR, Relay, Weather

from glmjax.serving.transfer.params import from_params

LONG = list(range(20, 60))


class House:
    """Two servers, their engines, and a front."""

    def __init__(self, prefill=None, decode=None, engine_keys=(), **options):
        hub = {}
        self.prefill = make_engine("prefill-1", "prefill", hub=hub, **(prefill or {}))
        self.decode = make_engine("decode-1", "decode", hub=hub, block_size=3, **(decode or {}))
        self.stack = contextlib.ExitStack()
        self.servers = [
            self.stack.enter_context(start_server(engine, role, engine_keys))
            for engine, role in ((self.prefill, "prefill"), (self.decode, "decode"))
        ]
        urls = [server.url for server in self.servers]
        self.front = self.stack.enter_context(front_of(*urls, **{"min_prefill_tokens": 8, **options}))
        self.web = self.stack.enter_context(httpx.Client(base_url=self.front.url, timeout=30))

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.stack.close()

    def ask(self, prompt, max_tokens=5, **more):
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **more}
        return self.web.post("/v1/completions", json=body)

    def routed(self):
        """Calls by what became of their prompts."""
        text = self.web.get("/metrics").text
        rows = [line for line in text.splitlines() if line.startswith("glmjax:front_calls_total")]
        return {row.split('"')[1]: int(float(row.split()[-1])) for row in rows}

    def all_returned(self, seconds=10.0):
        """Nothing is held on either side, within so many seconds."""
        deadline = time.monotonic() + seconds
        while left := self._held():
            assert time.monotonic() < deadline, left
            time.sleep(0.05)

    def _held(self):
        held = {}
        for engine in (self.prefill, self.decode):
            if not engine.healthy:
                continue
            stats, handoff = engine.stats(), engine.scheduler.handoff
            held |= {
                f"{handoff.connector.info.engine_id}: {name}": count
                for name, count in (
                    ("blocks", stats["total_blocks"] - stats["free_blocks"]),
                    ("requests", stats["num_running"] + stats["num_waiting"]),
                    ("leases", stats["kv_transfer_leases_held"]),
                    ("stage", handoff.stage_blocks - stats["kv_transfer_stage_free"]),
                )
                if count
            }
        return held


@pytest.fixture(scope="module")
def house():
    with House() as house:
        yield house


def ids_of(answer):
    assert answer.status_code == 200, answer.text
    return [choice["token_ids"] for choice in answer.json()["choices"]]


def test_answers_are_those_of_one_engine(house):
    before = house.prefill.stats()["kv_transfer_leases_done"]
    prompts = [[(7 * n + i) % 250 for i in range(n)] for n in (1, 2, 9, 12, 13, 40, 200)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        answers = list(pool.map(house.ask, prompts))
    assert [ids_of(answer) for answer in answers] == [[expected(prompt, 5)] for prompt in prompts]
    house.all_returned()
    assert house.prefill.stats()["kv_transfer_leases_done"] - before == 5  # all but the two short ones


def test_a_call_with_several_prompts_is_the_decode_engines(house):
    before = house.routed()["decode"]
    prompts = [[90 + n, *range(30)] for n in range(3)]
    assert ids_of(house.ask(prompts)) == [expected(prompt, 5) for prompt in prompts]
    assert house.routed()["decode"] == before + 1


def test_several_completions_of_a_prompt(house):
    before = house.decode.stats()["kv_transfer_fetches_done"]
    alike = ids_of(house.ask([3, *LONG], n=3, temperature=1, seed=VOCAB, stream=False))
    assert alike[0] == expected([3, *LONG], 5) and len(alike) == 3  # noise of 0, 1 and 2
    assert house.decode.stats()["kv_transfer_fetches_done"] == before + 1


def test_a_stream_has_the_same_tokens(house):
    text = house.ask([4, *LONG], stream=True, stream_options={"include_usage": True}).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    parts = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert [i for choice in parts for i in choice.get("token_ids", ())] == expected([4, *LONG], 5)


def test_chats_go_through_both(house):
    before = house.decode.stats()["kv_transfer_fetches_done"]
    body = {"messages": [{"role": "user", "content": "a question of some length"}], "max_tokens": 3, "temperature": 0}
    answer = house.web.post("/v1/chat/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["token_ids"] == expected(answer.json()["prompt_token_ids"], 3)
    assert house.decode.stats()["kv_transfer_fetches_done"] == before + 1


def test_short_prompts_and_short_rests_skip_the_prefill_engine(house):
    before = house.routed()
    ids_of(house.ask([1, 2, 3]))
    turn = [5, *LONG]
    out = ids_of(house.ask(turn, 12))[0]
    assert ids_of(house.ask([*turn, *out, 9], 4)) == [expected([*turn, *out, 9], 4)]
    after = house.routed()
    assert after["decode"] - before.get("decode", 0) == 2 and after["prefill"] - before["prefill"] == 1


def test_the_decode_engine_answers_all_other_paths(house):
    assert house.web.get("/v1/models").json()["data"][0]["id"] == "fake"
    assert house.web.post("/tokenize", json={"prompt": "ab"}).json()["tokens"] == TOKENIZER.encode("ab")
    assert house.web.get("/v1/models/fake").json()["id"] == "fake"
    assert house.web.get("/nowhere").status_code == 404


@pytest.mark.parametrize("path", ["/v1/./completions", "/a/../v1/completions", "//v1/completions", "/v1/completions/"])
def test_no_way_round_leads_a_clients_own_offer_to_the_decode_engine(house, path):
    offer = offered(house, [9, *LONG])
    body = json.dumps({"prompt": [9, *LONG], "max_tokens": 2, "kv_transfer_params": offer}).encode()
    before = house.decode.stats()["kv_transfer_fetches_done"]
    # A client may send any path.
    with socket.create_connection((house.front.host, house.front.port), timeout=10) as plain:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        plain.sendall(head.encode() + body)
        answer = b""
        while piece := plain.recv(65536):
            answer += piece
    assert answer.split()[1] in (b"404", b"405", b"307")
    assert house.decode.stats()["kv_transfer_fetches_done"] == before
    decoded(house, [9, *LONG], offer)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": LONG, "max_tokens": 100000}, "max_tokens"),
        ({"prompt": LONG, "temperature": "hot"}, "temperature"),
        ({"prompt": LONG, "kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({}, "prompt"),
    ],
)
def test_bad_calls_get_the_decode_engines_error(house, body, wanted):
    answer = house.web.post("/v1/completions", json=body)
    assert answer.status_code == 400 and wanted in answer.json()["error"]["message"]
    house.all_returned()


def test_a_body_that_is_no_json_is_an_error(house):
    answer = house.web.post("/v1/completions", content=b"{")
    assert answer.status_code == 400 and "JSON" in answer.json()["error"]["message"]


def test_keys_are_asked_for_and_handed_on():
    with House(api_keys=["secret"], engine_keys=["secret"]) as house:
        assert house.ask(LONG).status_code == 401
        house.web.headers["authorization"] = "Bearer secret"
        assert ids_of(house.ask(LONG)) == [expected(LONG, 5)]
        assert house.routed() == {"prefill": 1}


def test_both_engines_know_a_call_by_one_name(house):
    name = "call-of-a-test"
    answer = house.web.post(
        "/v1/completions", json={"prompt": [10, *LONG], "max_tokens": 2}, headers={"x-request-id": name}
    )
    assert answer.json()["id"] == f"cmpl-{name}"
    assert house.decode.stats()["kv_transfer_leases_held"] == 0


def test_without_its_prefill_engine_the_decode_engine_computes_prompts():
    with House() as house:
        house.servers[0].close()
        assert ids_of(house.ask(LONG)) == [expected(LONG, 5)]
        assert house.routed() == {"recomputed": 1} and house.web.get("/health").status_code == 200


def test_without_its_prefill_engine_calls_fail_where_that_is_wanted():
    with House(on_failure="fail") as house:
        house.servers[0].close()
        answer = house.ask(LONG)
        assert answer.status_code == 502 and "was not computed" in answer.json()["error"]["message"]
        assert house.web.get("/health").status_code == 503
        assert ids_of(house.ask([1, 2, 3])) == [expected([1, 2, 3], 5)]


def test_a_prefill_engine_that_hangs_is_given_up():
    with House(prefill={"delay": 3.0}, prefill_timeout=0.3) as house:
        began = time.monotonic()
        assert ids_of(house.ask(LONG)) == [expected(LONG, 5)]
        assert time.monotonic() - began < 3.0
        house.all_returned()


def test_metrics_of_either_engine_are_read_through_the_front():
    with House() as house:
        ids_of(house.ask(LONG, 5))
        generated = 'vllm:generation_tokens_total{engine="0",model_name="fake"} '
        of_decode, of_prefill = (house.web.get(path).text for path in ("/metrics", "/metrics/prefill"))
        assert f"{generated}5.0" in of_decode and f"{generated}1.0" in of_prefill
        assert "glmjax:front_calls_total" in of_decode and "glmjax:front_calls_total" not in of_prefill


def test_without_its_prefill_engine_metrics_go_on():
    with House(api_keys=["secret"]) as house:
        house.servers[0].close()
        answer = house.web.get("/metrics/prefill")
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_unreachable"
        assert "vllm:num_requests_running" in house.web.get("/metrics").text


def test_without_its_decode_engine_calls_fail():
    with House() as house:
        house.servers[1].close()
        answer = house.ask(LONG)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_unreachable"
        assert house.web.get("/health").status_code == 503


def test_a_stream_whose_engine_is_lost_ends_with_an_error():
    with House(decode={"delay": 0.05}) as house:
        house.servers[1]._uvicorn.config.timeout_graceful_shutdown = 0.1
        body = {"prompt": LONG, "max_tokens": 200, "temperature": 0, "stream": True}
        with house.web.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            threading.Thread(target=house.servers[1].close).start()
            events = [line.removeprefix("data: ") for line in lines if line]
        assert events[-1] == "[DONE]" and "error" in json.loads(events[-2])


def test_a_prefill_engine_that_cannot_be_reached_is_left_alone_for_a_while(monkeypatch):
    with House() as house:
        house.servers[0].close()
        for _ in range(2):
            ids_of(house.ask(LONG))
        tried = []
        monkeypatch.setattr(httpx.AsyncClient, "post", lambda *a, **k: tried.append(a))
        assert ids_of(house.ask([1, *LONG])) == [expected([1, *LONG], 5)]
        assert not tried


def test_a_connection_that_breaks_off_once_says_nothing_of_the_next():
    with House() as house, contextlib.closing(Relay(seed=0)) as relay:
        relay.behind = house.servers[0].port
        with front_of(f"http://127.0.0.1:{relay.port}", house.servers[1].url, min_prefill_tokens=8) as front:
            for weather in (Weather(breaks=1.0), FAIR):
                relay.weather = weather
                body = {"prompt": [relay.broken, *LONG], "max_tokens": 5, "temperature": 0, "return_token_ids": True}
                answer = httpx.post(f"{front.url}/v1/completions", json=body, timeout=30)
                assert ids_of(answer) == [expected(body["prompt"], 5)]
            counts = httpx.get(f"{front.url}/metrics").text
        assert 'glmjax:front_calls_total{prompt="recomputed"} 1.0' in counts
        assert 'glmjax:front_calls_total{prompt="prefill"} 1.0' in counts


def test_an_error_of_the_prefill_engine_reaches_the_client_where_calls_are_to_fail():
    with House(on_failure="fail", prefill={"num_blocks": 5}) as house:
        answer = house.ask(LONG)
        assert answer.status_code == 400 and "KV blocks" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_can_leave_a_decode_engine_that_hangs(stream):
    with socket.socket() as deaf, House() as house:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        with front_of(house.servers[0].url, f"http://127.0.0.1:{deaf.getsockname()[1]}") as front:
            with pytest.raises(httpx.TimeoutException):
                httpx.post(front.url + "/v1/completions", json={"prompt": LONG, "stream": stream}, timeout=0.5)
            connection, _ = deaf.accept()
            connection.settimeout(10)
            while connection.recv(65536):  # until the front hangs up too
                pass
            connection.close()


@pytest.mark.parametrize("slow", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_leaves_nothing_behind(slow, stream):
    with House(**{slow: {"delay": 0.2}}) as house:
        with pytest.raises(httpx.TimeoutException):
            body = {"prompt": LONG, "max_tokens": 300, "stream": stream}
            with house.web.stream("POST", "/v1/completions", json=body, timeout=1.0) as answer:
                if not stream:
                    answer.read()
                raise httpx.TimeoutException("enough")
        house.all_returned()


def test_another_front_goes_on_where_one_has_ended():
    with House() as house:
        first = ids_of(house.ask(LONG))[0]
        house.front.close()
        with front_of(*(server.url for server in house.servers), min_prefill_tokens=8) as front:
            body = {"prompt": [*LONG, *first, 1], "max_tokens": 4, "temperature": 0, "return_token_ids": True}
            answer = httpx.post(front.url + "/v1/completions", json=body, timeout=30)
        assert ids_of(answer) == [expected([*LONG, *first, 1], 4)]


def test_more_calls_than_the_stage_holds_all_get_their_answer():
    with House(prefill={"stage_blocks": 30}, decode={"stage_blocks": 40}) as house:
        prompts = [[n, *range(80)] for n in range(12)]
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(house.ask, prompts))
        assert [ids_of(answer) for answer in answers] == [[expected(prompt, 5)] for prompt in prompts]
        house.all_returned()


@pytest.mark.parametrize("short", ["prefill", "decode"])
def test_a_prompt_that_is_longer_than_the_stage_is_computed_where_it_is_decoded(short):
    with House(**{short: {"stage_blocks": 8}}) as house:
        assert ids_of(house.ask(LONG)) == [expected(LONG, 5)]
        assert house.routed() == {"recomputed" if short == "prefill" else "prefill": 1}
        house.all_returned()


# -- kv_transfer_params, as a sidecar drives the engines ------------------------------------------


def offered(house, prompt, path="/v1/completions", **more):
    body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}, **more}
    answer = httpx.post(house.servers[0].url + path, json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()["kv_transfer_params"]


def decoded(house, prompt, params, max_tokens=4):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True}
    return httpx.post(house.servers[1].url + "/v1/completions", json=body | {"kv_transfer_params": params}, timeout=30)


def test_a_sidecar_can_drive_both_engines(house):
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    asked |= {"remote_host": None, "remote_port": None}
    params = offered(house, [6, *LONG], kv_transfer_params=asked)
    assert params["do_remote_prefill"] and from_params(params).num_tokens == len(LONG) + 1
    before = house.decode.stats()["kv_transfer_bytes_fetched"]
    assert ids_of(decoded(house, [6, *LONG], params)) == [expected([6, *LONG], 4)]
    assert house.decode.stats()["kv_transfer_bytes_fetched"] - before == len(LONG) * 28  # all tokens but the last
    house.all_returned()


def test_an_offer_of_another_prompt_is_not_believed(house):
    params = offered(house, [11, *LONG])
    for _ in range(2):  # nor is anything of it found later
        assert ids_of(decoded(house, [12, *LONG], params)) == [expected([12, *LONG], 4)]
    house.all_returned()


@pytest.mark.parametrize("stop", ["", "\x7f"])
def test_a_prompt_whose_output_is_ended_by_a_stop_string_is_over(house, stop):
    """There is nothing to offer then, and whoever waits is told."""
    prompt = next([n, *LONG] for n in range(250) if 65 <= expected([n, *LONG], 1)[0] <= 90)
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stop": [stop or chr(expected(prompt, 1)[0])]}
    body["kv_transfer_params"] = {"do_remote_decode": True}
    answer = httpx.post(house.servers[0].url + "/v1/completions", json=body, timeout=30)
    assert answer.status_code == 200, answer.text
    assert ("kv_transfer_params" in answer.json()) == bool(stop)
    house.all_returned()


def test_what_the_decode_engine_has_cached_is_not_offered(monkeypatch):
    with House() as house:
        first = ids_of(house.ask([*LONG, *LONG]))[0]
        turn = [*LONG, *LONG, *first, *LONG]
        before = house.decode.stats()["kv_transfer_bytes_fetched"]
        connector, offers = house.prefill.scheduler.handoff.connector, []
        offer = connector.offer
        monkeypatch.setattr(connector, "offer", lambda *a, **k: (offers.append(k["first"]), offer(*a, **k))[1])
        assert ids_of(house.ask(turn)) == [expected(turn, 5)]
        assert offers == [84]  # of the 84 tokens that were computed there
        assert house.decode.stats()["kv_transfer_bytes_fetched"] - before == (len(turn) - 1 - 84) * 28
        house.all_returned()


def test_what_the_decode_engine_has_lost_meanwhile_is_computed():
    with House() as house:
        params = offered(house, LONG, kv_transfer_params={"do_remote_decode": True, "cached_tokens": 20})
        assert ids_of(decoded(house, LONG, params)) == [expected(LONG, 4)]
        assert house.decode.stats()["kv_transfer_recomputed"] == 1
        house.all_returned()


def test_an_offer_that_is_used_twice_is_computed_the_second_time(house):
    prompt = [7, *LONG]
    params = offered(house, prompt)
    for _ in range(2):
        assert ids_of(decoded(house, prompt, params)) == [expected(prompt, 4)]
        house.decode.reset_prefix_cache()
    house.all_returned()


def test_an_offer_that_has_expired_is_computed():
    with House(prefill={"settings": {"lease_seconds": 0.2}}) as house:
        params = offered(house, LONG)
        time.sleep(0.4)
        assert ids_of(decoded(house, LONG, params)) == [expected(LONG, 4)]
        assert house.decode.stats()["kv_transfer_recomputed"] == 1
        house.all_returned()


@pytest.mark.parametrize("change", [{"remote_block_ids": [[0]]}, {"remote_engine_id": "gone"}, {"remote_dp_rank": 3}])
def test_an_offer_that_was_changed_on_the_way_is_not_believed(house, change):
    prompt = [8, *LONG]
    params = offered(house, prompt)
    house.decode.reset_prefix_cache()
    assert ids_of(decoded(house, prompt, params | change)) == [expected(prompt, 4)]
    house.all_returned(seconds=20)


def test_an_engine_of_another_version_is_refused_and_named():
    with House(prefill={"version": "old"}, decode={"on_failure": "fail"}) as house:
        answer = decoded(house, LONG, offered(house, LONG))
        assert answer.status_code == 500
        assert "glmjax_version is 'test' at decode-1 and 'old' at prefill-1" in answer.json()["error"]["message"]
        house.all_returned()


@pytest.mark.parametrize(
    ("role", "params", "said"),
    [
        (0, {"do_remote_prefill": True, "remote_engine_id": "x"}, "--role decode"),
        (1, {"do_remote_prefill": True, "remote_engine_id": "x"}, "remote_num_tokens"),
        (1, {"do_remote_decode": True}, "--role prefill"),
        (1, "yes", "must be an object"),
        (1, [{}, {}], "must be an object"),
        (1, {"do_remote_prefill": True, "do_remote_decode": True}, "exclude"),
    ],
)
def test_params_that_an_engine_cannot_follow_are_refused(house, role, params, said):
    body = {"prompt": LONG, "max_tokens": 1, "kv_transfer_params": params}
    answer = httpx.post(house.servers[role].url + "/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "kv_transfer_params"


def test_an_offer_for_a_shorter_prompt_is_refused(house):
    params = offered(house, LONG[:20])
    answer = decoded(house, LONG, params)
    assert answer.status_code == 400 and "20 tokens is offered for a prompt of 40" in answer.json()["error"]["message"]
    house.all_returned(seconds=3)  # the lease would last for longer


@pytest.mark.parametrize("more", [{"max_tokens": 100000}, {"stop_token_ids": [-1]}])
def test_the_offer_of_a_call_that_is_refused_is_given_up(house, more):
    params = offered(house, LONG)
    body = {"prompt": LONG, "kv_transfer_params": params, **more}
    assert httpx.post(house.servers[1].url + "/v1/completions", json=body, timeout=30).status_code == 400
    house.all_returned(seconds=3)


def test_a_call_sent_again_does_not_end_the_lease_of_the_first():
    with House(decode={"delay": 0.1}) as house:
        params = offered(house, LONG)
        body = {"prompt": LONG, "max_tokens": 8, "temperature": 0, "return_token_ids": True, "request_id": "same"}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            url, body = house.servers[1].url + "/v1/completions", body | {"kv_transfer_params": params}
            first = pool.submit(httpx.post, url, json=body, timeout=30)
            while not house.decode.stats()["num_running"]:
                time.sleep(0.01)
            assert "in use" in httpx.post(url, json=body, timeout=30).json()["error"]["message"]
            assert ids_of(first.result()) == [expected(LONG, 8)]
        assert house.decode.stats()["kv_transfer_recomputed"] == 0


def test_several_prompts_have_no_params(house):
    body = {"prompt": [LONG, LONG], "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    answer = httpx.post(house.servers[0].url + "/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400 and "one prompt" in answer.json()["error"]["message"]


def test_an_offer_is_not_made_in_a_stream(house):
    body = {"prompt": LONG, "max_tokens": 1, "stream": True, "kv_transfer_params": {"do_remote_decode": True}}
    answer = httpx.post(house.servers[0].url + "/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400 and "stream=false" in answer.json()["error"]["message"]


def withdrawn(house, params):
    answer = httpx.post(house.servers[0].url + "/v1/kv_transfer/withdraw", json={"kv_transfer_params": params})
    assert answer.status_code == 200, answer.text
    return answer.json()["withdrawn"]


def test_an_offer_can_be_withdrawn_once():
    with House(prefill={"settings": {"lease_seconds": 60.0}}) as house:
        params = offered(house, LONG)
        assert [withdrawn(house, params) for _ in range(2)] == [True, False]
        house.all_returned()
        assert ids_of(decoded(house, LONG, params)) == [expected(LONG, 4)]
        assert house.decode.stats()["kv_transfer_recomputed"] == 1


def test_an_offer_of_another_engine_is_not_withdrawn_here(house):
    params = offered(house, LONG)
    assert withdrawn(house, params | {"remote_engine_id": "another"}) is False
    assert withdrawn(house, params) is True


@pytest.mark.parametrize("params", [None, {"do_remote_decode": True}])
def test_what_is_no_offer_withdraws_nothing(house, params):
    assert withdrawn(house, params) is False


@contextlib.contextmanager
def lost_decode_engine(*, hangs):
    """It says that it lacks the whole of a prompt, and never answers the call itself, or hangs up on it."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            if self.path.endswith("/uncached_tokens"):
                counts = {"prompt_tokens": [len(LONG)], "uncached_tokens": [len(LONG)], "data_parallel_rank": [0]}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(counts).encode())
            elif hangs:
                over.wait(30)

        def log_message(self, *_):
            pass

    over = threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        over.set()
        server.shutdown()


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_an_offer_that_reaches_nobody_is_given_up_at_once(hangs, stream):
    with (
        House(prefill={"settings": {"lease_seconds": 60.0}}) as house,
        lost_decode_engine(hangs=hangs) as lost,
        front_of(house.servers[0].url, lost, min_prefill_tokens=8) as front,
    ):
        body = {"prompt": LONG, "stream": stream}
        if hangs:
            with pytest.raises(httpx.TimeoutException):
                httpx.post(front.url + "/v1/completions", json=body, timeout=0.7)
        else:
            assert httpx.post(front.url + "/v1/completions", json=body, timeout=30).status_code == 503
        house.all_returned(seconds=3)
        stats = house.prefill.stats()
        assert (stats["kv_transfer_leases_failed"], stats["kv_transfer_leases_offered"]) == (1, 1)


def test_engines_and_front_say_what_they_are(house):
    servers = [*house.servers, house.front]
    said = [httpx.get(server.url + "/version").json()["role"] for server in servers]
    assert said == ["prefill", "decode", "front"]


def test_an_engine_without_a_role_takes_no_params():
    engine = make_engine("alone", None, hub={})
    with start_server(engine, None) as server:
        body = {"prompt": LONG, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
        assert answer.status_code == 400 and "has no role" in answer.json()["error"]["message"]
