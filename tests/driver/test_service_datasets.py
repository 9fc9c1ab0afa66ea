"""Datasets over REST and from the configuration: shares given, changed and shown, and what is refused before anything is half done."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn
from typer.testing import CliRunner

from driver import submits
from driver.cli import app as cli
from driver.commands_datasets import changes_table, datasets_table, mapping_json
from driver.core import Core
from driver.feed import Feed
from driver.mix import Change, FeedError
from driver.service import create_app
from driver.settings_data import DataConfig
from driver.terminal import Service
from tests.driver.feeding import Lab


def body(*names: str) -> bytes:
    return "".join(json.dumps({"prompt": name, "answer": "", "task_type": "sort"}) + "\n" for name in names).encode()


class Rest:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        (lab.core.config.directory).mkdir(parents=True, exist_ok=True)
        self.run: Any = SimpleNamespace(core=lab.core, config=lab.config, dispatch=lab.dispatch)
        app = create_app(SimpleNamespace(runs={"r": self.run}, waiting={}), token=None, loopback=True, shutdown=lambda: None)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://service")

    async def call(self, method: str, path: str = "", **more: Any) -> httpx.Response:
        return await self.http.request(method, f"/v1/runs/r/datasets{path}", **more)

    async def refused(self, method: str, path: str = "", **more: Any) -> str:
        reply = await self.call(method, path, **more)
        assert 400 <= reply.status_code < 500, reply.text
        return reply.json()["error"]["message"]


@pytest.fixture
async def rest(tmp_path):
    lab = Lab(tmp_path, f"run_dir={tmp_path}/run")
    yield Rest(lab)
    lab.close()


async def test_a_dataset_is_submitted_with_its_share_shown_and_changed_while_the_run_goes_on(rest):
    reply = await rest.call("POST", content=body("a", "b"), params={"name": "easy", "weight": 3, "priority": 1, "epochs": "forever"})
    assert reply.status_code == 201 and reply.json()["dataset_id"] == "d000000"
    await rest.call("POST", content=body("c"), params={"name": "hard", "priority": 1, "close": "false"})
    first, second = (await rest.call("GET")).json()
    assert (first["weight"], first["priority"], first["epochs"], first["share_planned"]) == (3.0, 1, None, 0.75)
    assert (second["weight"], second["closed"], second["share_planned"], second["rows"]) == (1.0, False, 0.25, 1)
    rest.lab.sample(1.0, 1.0)
    changed = await rest.call("PATCH", "/d000001", json={"weight": 9, "epochs": 2})
    assert changed.status_code == 200 and (changed.json()["share_planned"], changed.json()["epochs"]) == (0.75, 2)
    assert (await rest.call("POST", "/d000001/rows", content=body("d"))).json()["rows"] == 2
    await rest.call("POST", "/d000001/close")
    (one,) = [each for each in (await rest.call("GET")).json() if each["closed"] and each["name"] == "hard"]
    assert one["rows"] == 2 and one["pass"] == 1
    history = (await rest.call("GET", "/d000001")).json()["changes"]
    assert [(each["by"], each["from_uid"], each["changes"]) for each in history] == [
        ("submit", 0, {"d000001": {"priority": 1}}),
        ("request", 1, {"d000001": {"weight": 9.0, "epochs": 2}}),
    ]
    for table in (datasets_table((await rest.call("GET")).json()), changes_table(history)):
        assert table.row_count == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"weight": -1},
        {"weight": "nan"},
        {"weight": "inf"},
        {"weight": "1e-12"},
        {"weight": 0},
        {"priority": "1.5"},
        {"priority": 10**9},
        {"epochs": 0},
        {"epochs": "twice"},
        {"epochs": "1" * 30},
    ],
)
async def test_O4_a_submit_with_a_share_that_is_none_is_refused_before_a_row_is_read(rest, wrong):
    said = await rest.refused("POST", content=b"not even JSON", params=wrong)
    assert next(iter(wrong)) in said
    assert (await rest.call("GET")).json() == [] and rest.lab.core.ledger.mixes == 0


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ('{"weight": -1}', "weight -1.0 for d000000 is no share"),
        ('{"weight": NaN}', "weight"),
        ('{"weight": Infinity}', "weight"),
        ('{"weight": 0}', "all weights would be 0"),
        ('{"weight": "much"}', "weight"),
        ('{"weight": true}', "weight"),
        ('{"priority": 1.5}', "priority"),
        ('{"priority": "high"}', "priority"),
        ('{"epochs": 0}', "epochs"),
        ('{"wieght": 1}', "wieght"),
        ("{}", "nothing to change"),
        ("[]", "body"),
        ("{", "body"),
    ],
)
async def test_O4_a_change_that_is_none_is_refused_and_changes_nothing(rest, sent, words):
    await rest.call("POST", content=body("a"))
    said = await rest.refused("PATCH", "/d000000", content=sent, headers={"content-type": "application/json"})
    assert words in said
    assert (await rest.call("GET")).json()[0]["weight"] == 1.0 and rest.lab.core.ledger.mixes == 1


async def test_a_dataset_that_is_not_there_is_404_and_the_known_are_named(rest):
    await rest.call("POST", content=body("a"))
    for method, path in (
        ("PATCH", "/d7"),
        ("GET", "/d7"),
        ("POST", "/d7/rows"),
        ("POST", "/d7/close"),
        ("GET", "/d7/solved"),
        ("GET", "/d7/left_out"),
    ):
        reply = await rest.call(method, path, **({"json": {"weight": 2}} if method == "PATCH" else {}))
        assert reply.status_code == 404 and "known: d000000" in reply.json()["error"]["message"], path


async def test_W6_a_submit_sent_again_with_its_key_changes_neither_rows_nor_shares(rest):
    for _ in range(2):
        reply = await rest.call("POST", content=body("a"), params={"weight": 2}, headers={"idempotency-key": "k"})
        assert reply.status_code == 201
        await rest.call("PATCH", "/d000000", json={"weight": 5})
    assert reply.json()["created"] is False
    (one,) = (await rest.call("GET")).json()
    assert (one["rows"], one["weight"]) == (1, 5.0)


async def test_W2_a_change_is_on_disk_before_any_sample_that_it_chose(rest, tmp_path):
    """Both are queued for the same writer in this order, so whatever a crash cuts off, it never cuts off the change alone."""
    for name in "ab":
        await rest.call("POST", content=body(*[f"{name}{i}" for i in range(20)]), params={"name": name})
    await rest.lab.db.durable()
    queued: list[Any] = []
    rest.lab.db.write = lambda writes: queued.extend(writes)  # type: ignore[method-assign]
    await submits.change(rest.lab.core, {"d000001": Change(9.0)}, by=submits.REQUEST)
    rest.lab.sample(1.0, 0.0)
    assert [write.table for write in queued].index("mixes") < [write.table for write in queued].index("samples")


async def test_solved_rows_are_listed_page_by_page_with_what_showed_it(rest):
    rest.lab.core.config = rest.lab.config.model_copy(update={"filter": rest.lab.config.filter.model_copy(update={"skip_solved": True})})
    rest.lab.dispatch.judge._config = rest.lab.core.config.filter
    await rest.call("POST", content=body("a", "b", "c"))
    for _ in range(3):
        rest.lab.sample(1.0, 1.0)
    await rest.lab.db.durable()
    page = (await rest.call("GET", "/d000000/solved", params={"limit": 2})).json()
    rest_of_it = (await rest.call("GET", "/d000000/solved", params={"limit": 2, "after": page["next"]})).json()
    assert [each["uid"] for each in page["items"] + rest_of_it["items"]] == [0, 1, 2] and rest_of_it["next"] is None
    assert page["items"][1]["why"] == "2 of 2 trajectories of sample 1 were right" and page["items"][1]["skipped_at"] is None


async def test_H3_rows_that_are_left_out_are_listed_page_by_page_with_the_reason(rest):
    long = "1" * 500
    await rest.call("POST", content=body(long, "a", long, long))
    assert rest.lab.dispatch.next_row.look()
    (dataset,) = (await rest.call("GET")).json()
    assert dataset["left_out_rows"] == 1, "the next one that fits is found, and no further"
    rest.lab.sample(1.0, 0.0)
    assert rest.lab.dispatch.next_row.look()
    await rest.lab.db.durable()
    page = (await rest.call("GET", "/d000000/left_out", params={"limit": 2})).json()
    rest_of_it = (await rest.call("GET", "/d000000/left_out", params={"limit": 2, "after": page["next"]})).json()
    items = page["items"] + rest_of_it["items"]
    assert [each["row_index"] for each in items] == [0, 2, 3] and rest_of_it["next"] is None
    assert all(each["why"].startswith("the prompt is too long: it has 500 tokens") for each in items)


# ---- the command line, over real HTTP --------------------------------------------------------------------------------------


@contextmanager
def served(lab: Lab) -> Iterator[str]:
    run: Any = SimpleNamespace(core=lab.core, config=lab.config, dispatch=lab.dispatch)
    lab.core.config.directory.mkdir(parents=True, exist_ok=True)
    app = create_app(SimpleNamespace(runs={"r": run}, waiting={}), token=None, loopback=True, shutdown=lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


def test_the_commands_submit_mix_append_close_and_show_and_say_what_is_wrong_in_a_sentence(tmp_path):
    lab = Lab(tmp_path, f"run_dir={tmp_path}/run")
    (tmp_path / "a.jsonl").write_bytes(body("a0", "a1"))
    (tmp_path / "more.jsonl").write_bytes(body("b0"))
    try:
        with served(lab) as url:

            def headrace(*argv: str, status: int = 0) -> str:
                done = CliRunner().invoke(cli, [*argv, "--url", url, "--run", "r"], env={"COLUMNS": "200"})
                assert done.exit_code == status, done.output
                return " ".join((done.output + done.stderr).split())

            file, more = str(tmp_path / "a.jsonl"), str(tmp_path / "more.jsonl")
            wrong = headrace("submit", file, "--weight", "-1", status=1)
            assert "weight -1.0 is no share" in wrong
            assert "2 rows added, 2 in all, closed" in headrace("submit", file, "--weight", "3", "--epochs", "2")
            assert "1 rows added" in headrace("submit", more, "--keep-open", "--priority", "1")
            assert "1 rows added, 2 in all" in headrace("append", more, "d000001", "--key", "k")
            assert "0 rows added, 2 in all" in headrace("append", more, "d000001", "--key", "k")
            assert "is closed" in headrace("close", "d000001")
            assert "is closed; submit a new one" in headrace("append", more, "d000001", status=1)
            assert "1 of ever 0.5" in headrace("mix", "d000001", "--weight", "0.5", "--epochs", "forever")
            for argv, words in (
                (("--weight", "nan"), "finite number"),
                (("--epochs", "often"), "write a number of passes, or forever"),
                ((), "nothing to change"),
            ):
                assert words in headrace("mix", "d000001", *argv, status=1)
            assert "there is no dataset 'd7'; known: d000000, d000001" in headrace("mix", "d7", "--weight", "1", status=1)
            shown = headrace("datasets")
            assert "a.jsonl 2 0 1 of 2 3 0 - - 0 0 0 0 -" in shown and "more.jsonl 2 0 1 of ever 0.5 1 100%" in shown
            assert "d000001 weight 0.5, epochs forever" in headrace("datasets", "--changes")
    finally:
        lab.close()


# ---- from the configuration ------------------------------------------------------------------------------------------------


def start(lab: Lab, *data: DataConfig) -> Any:
    """What a start does, with this configuration, over the same database."""
    config = lab.config.model_copy(update={"data": list(data)})
    feed = Feed(lab.db, seed=0, shuffle=False, passes=1)
    return SimpleNamespace(core=Core(config, lab.db.load(), lab.db, feed, lab.store), config=config)


async def test_the_datasets_of_the_configuration_are_submitted_once_and_a_share_changed_there_holds_from_the_next_start(tmp_path):
    lab = Lab(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(body(name + "0", name + "1"))
    a = DataConfig(path=tmp_path / "a.jsonl", weight=3)
    b = DataConfig(path=tmp_path / "b.jsonl", name="other", epochs=None)
    try:
        run = start(lab, a, b)
        await submits.submit_own(run)
        assert {d.name for d in run.core.feed.datasets()} == {"a.jsonl", "other"} and run.core.feed.closed
        assert (run.core.ledger.cursor["d000000"].weight, run.core.feed.passes(run.core.ledger.cursor["d000001"])) == (3.0, None)
        await submits.change(run.core, {"d000000": Change(7.0)}, by=submits.REQUEST)
        for said, holds in ((a, 7.0), (a.model_copy(update={"weight": 4.0}), 4.0)):
            run = start(lab, said, b)
            await submits.submit_own(run)
            assert run.core.ledger.cursor["d000000"].weight == holds, "a request stays while the configuration says what it said"
            assert run.core.feed.rows == 4
    finally:
        lab.close()


async def test_O4_a_bad_second_file_leaves_the_first_and_is_named(tmp_path):
    lab = Lab(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(body("a"))
    (tmp_path / "b.jsonl").write_bytes(b"not json\n")
    try:
        with pytest.raises(ValueError, match="line 1"):
            await submits.submit_own(start(lab, DataConfig(path=tmp_path / "a.jsonl"), DataConfig(path=tmp_path / "b.jsonl")))
        run = start(lab)
        assert [d.name for d in run.core.feed.datasets()] == ["a.jsonl"]
        with pytest.raises(FeedError, match="weight -1"):
            await submits.add(run.core, tmp_path / "a.jsonl", dataset_id=None, name="x", share=Change(-1.0))
    finally:
        lab.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["prompt=a,answer=b,prompt=c"], "--map names prompt twice, as 'a' and as 'c': leave one"),
        (["prompt=a,answer=b", "prompt=c"], "--map names prompt twice, as 'a' and as 'c': leave one"),
        (["prompt=a", "answer"], "--map 'answer': write it as TARGET=FIELD"),
        (["=a"], "write it as TARGET=FIELD"),
    ],
)
@pytest.mark.parametrize("command", [["submit"], ["append"]])
def test_O1_a_target_that_is_mapped_twice_is_refused_before_anything_is_sent(tmp_path, monkeypatch, command, options, words):
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    monkeypatch.setattr(Service, "call", lambda *_, **__: pytest.fail("something was sent"))
    more = ["d000000"] if command == ["append"] else []
    flags = [part for option in options for part in ("--map", option)]
    done = CliRunner().invoke(cli, [*command, str(file), *more, *flags, "--url", "http://x", "--run", "r"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and words in " ".join((done.output + done.stderr).split())


async def test_O1_a_mapping_over_rest_that_names_a_target_twice_is_refused(rest):
    said = await rest.refused("POST", content=body("a"), params={"mapping": '{"prompt": "a", "answer": "b", "prompt": "c"}'})
    assert "mapping names 'prompt' twice; leave one" in said


@pytest.mark.parametrize("mapping", ["[" * 20_000, '{"answer": ' + "1" * 5000 + "}", "{"], ids=["deep", "a long number", "cut short"])
async def test_O1_a_mapping_over_rest_that_can_not_be_read_is_refused(rest, mapping):
    said = await rest.refused("POST", content=body("a"), params={"mapping": mapping})
    assert "mapping is not JSON" in said and len(said) < 500


def test_maps_of_several_options_are_one_mapping():
    assert json.loads(mapping_json(["prompt=question, answer=label", "id=nr"]) or "") == {
        "prompt": "question",
        "answer": "label",
        "id": "nr",
    }
    assert mapping_json(None) is None and mapping_json([]) is None
