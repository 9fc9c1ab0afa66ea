"""REST of the datasets: submit, append, close, shares, and what each has given. Part of `driver/service.py`."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Header, HTTPException, Query, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictInt, ValidationError

from driver import observe_data, submits
from driver.datasets import DatasetError, resolve_under
from driver.mix import PRIORITIES, Change, FeedError
from driver.run import Run

MAX_UPLOAD_BYTES = 4 << 30
MAX_JSON_BYTES = 64 << 10
FOR_EVER = "forever"
_WEIGHT = "share of the samples against the other datasets' weights; 0: no rows until it has another"
_PRIORITY = "while a dataset of higher priority has rows, it gives all samples"


class PathSubmit(BaseModel):
    """A dataset file on the service's machine, under one of `service.data_roots`."""

    model_config = ConfigDict(extra="forbid")
    path: str


ROWS_BODY = {
    "requestBody": {
        "content": {
            "application/octet-stream": {"schema": {"type": "string", "format": "binary"}},
            "application/json": {"schema": PathSubmit.model_json_schema()},
        }
    }
}
"""The routes read it as a stream, so FastAPI does not see it."""


class Submitted(BaseModel):
    dataset_id: str
    rows_added: int
    rows: int
    closed: bool
    created: bool = Field(description="false: this idempotency key was seen before and nothing was added")


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("give a number, not true or false")
    return value


class Mix(BaseModel):
    """What is left out stays. `epochs: null` is for ever."""

    model_config = ConfigDict(extra="forbid")
    weight: Annotated[float | None, BeforeValidator(_no_bool)] = Field(None, allow_inf_nan=False, description=_WEIGHT)
    priority: StrictInt | None = Field(None, ge=-PRIORITIES, le=PRIORITIES, description=_PRIORITY)
    epochs: StrictInt | None = Field(None, ge=1, le=1 << 31, description="passes over it; null: for ever")

    @property
    def change(self) -> Change:
        return Change(self.weight, self.priority, self.epochs, "epochs" in self.model_fields_set)


Weight = Annotated[float | None, Query(allow_inf_nan=False, description=_WEIGHT)]
Priority = Annotated[int | None, Query(ge=-PRIORITIES, le=PRIORITIES, description=_PRIORITY)]
Epochs = Annotated[
    str | None, Query(pattern=r"^([1-9][0-9]{0,8}|forever)$", description="passes over it, or forever; default: stop.epochs")
]
Mapping = Annotated[str | None, Query(description='field mapping as JSON: {"prompt": "question", "answer": "label"}')]


def add_routes(app: FastAPI, run_of: Callable[[str], Run]) -> None:
    RunDep = Annotated[Run, Depends(run_of)]

    def known(run: Run, dataset_id: str) -> dict[str, Any]:
        shown = {dataset["dataset_id"]: dataset for dataset in observe_data.datasets(run)}
        if dataset_id not in shown:
            raise HTTPException(404, f"there is no dataset {dataset_id!r}; known: {', '.join(shown) or 'none'}")
        return shown[dataset_id]

    @app.get("/v1/runs/{run}/datasets", tags=["datasets"])
    async def datasets(run: RunDep) -> list[dict[str, Any]]:
        """Each with its walk, its planned and real share, what the filter took, and recent pass rates."""
        return observe_data.datasets(run)

    @app.get("/v1/runs/{run}/datasets/{dataset_id}", tags=["datasets"])
    async def dataset(run: RunDep, dataset_id: str) -> dict[str, Any]:
        """One dataset, with the newest changes of its share: who decided, and from which sample on."""
        changed = [change for change in submits.changes(run.core) if dataset_id in change["changes"]]
        return known(run, dataset_id) | {"changes": changed}

    @app.get("/v1/runs/{run}/mixes", tags=["datasets"])
    async def mixes(run: RunDep, last: Annotated[int, Query(ge=1, le=1000)] = submits.SHOWN_CHANGES) -> list[dict[str, Any]]:
        """The newest changes of shares, oldest first."""
        return submits.changes(run.core, last)

    @app.get("/v1/runs/{run}/datasets/{dataset_id}/solved", tags=["datasets"])
    async def solved(
        run: RunDep,
        dataset_id: str,
        after: Annotated[str | None, Query(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}\.[0-9]{1,9}$")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        """Rows that were always right in a pass, with the sample that showed it, and whether the next pass left them out."""
        known(run, dataset_id)
        segment, row_index, pass_index = map(int, after.split(".")) if after else (-1, -1, -1)
        return observe_data.skipped(run, dataset_id, (segment, row_index, pass_index), limit)

    @app.get("/v1/runs/{run}/datasets/{dataset_id}/left_out", tags=["datasets"])
    async def left_out(
        run: RunDep,
        dataset_id: str,
        after: Annotated[str | None, Query(pattern=r"^[0-9]{1,9}\.[0-9]{1,9}$")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> dict[str, Any]:
        """Rows that can never be sampled (their prompt is too long, say) and are left out of every pass, each with its reason."""
        known(run, dataset_id)
        segment, row_index = map(int, after.split(".")) if after else (-1, -1)
        return observe_data.left_out(run, dataset_id, (segment, row_index), limit)

    @app.post("/v1/runs/{run}/datasets", tags=["datasets"], status_code=201, openapi_extra=ROWS_BODY)
    async def submit(
        request: Request,
        run: RunDep,
        name: str = "dataset",
        close: bool = True,
        mapping: Mapping = None,
        weight: Weight = None,
        priority: Priority = None,
        epochs: Epochs = None,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> Submitted:
        """The body is the file itself (JSONL or Parquet), or `{"path": …}` with content type application/json.

        `close=false` keeps the dataset open for more rows; the run ends when all datasets are closed and walked.
        """
        passes = None if epochs in (None, FOR_EVER) else int(epochs)
        share = Change(weight, priority, passes, epochs is not None)
        return await _submit(request, run, None, name, close, mapping, idempotency_key, share)

    @app.post("/v1/runs/{run}/datasets/{dataset_id}/rows", tags=["datasets"], status_code=201, openapi_extra=ROWS_BODY)
    async def append(
        request: Request,
        run: RunDep,
        dataset_id: str,
        mapping: Mapping = None,
        idempotency_key: Annotated[str | None, Header()] = None,
    ) -> Submitted:
        """Append rows to an open dataset, while the run goes on."""
        known(run, dataset_id)
        return await _submit(request, run, dataset_id, dataset_id, False, mapping, idempotency_key, None)

    @app.post("/v1/runs/{run}/datasets/{dataset_id}/close", tags=["datasets"])
    async def close_dataset(run: RunDep, dataset_id: str) -> dict[str, Any]:
        """No more rows for this dataset. Closing twice is the same as once."""
        known(run, dataset_id)
        await run.core.feed.close(dataset_id)
        run.core.ring()
        return {"dataset_id": dataset_id, "closed": True}

    @app.patch("/v1/runs/{run}/datasets/{dataset_id}", tags=["datasets"])
    async def mix(run: RunDep, dataset_id: str, body: Mix) -> dict[str, Any]:
        """Give a dataset another share, from the next sample on."""
        known(run, dataset_id)
        _going_on(run)
        if not body.change:
            raise FeedError("nothing to change: give weight, priority or epochs")
        await submits.change(run.core, {dataset_id: body.change}, by=submits.REQUEST)
        return known(run, dataset_id)


def _going_on(run: Run) -> None:
    if run.core.ledger.ended:
        raise HTTPException(409, f"run {run.core.run_id} has ended ({run.core.ledger.ended}); start one with another run_id")


async def _submit(
    request: Request, run: Run, dataset_id: str | None, name: str, close: bool, mapping: str | None, key: str | None, share: Change | None
) -> Submitted:
    fields = _mapping(mapping)
    if request.headers.get("content-type", "").partition(";")[0].strip() == "application/json":
        try:
            body = PathSubmit.model_validate_json(await _small_body(request))
        except ValidationError:
            text = 'with content type application/json the body is {"path": "FILE"}; to upload a file, send it as application/octet-stream'
            raise HTTPException(400, text) from None
        source = resolve_under(body.path, run.core.config.service.data_roots)
        return await _add(run, source, dataset_id, name, close, fields, key, share)
    with tempfile.NamedTemporaryFile(dir=run.core.config.directory, prefix=".upload-") as file:
        size = 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > MAX_UPLOAD_BYTES:
                raise HTTPException(413, f"an upload may have {MAX_UPLOAD_BYTES >> 30} GiB; submit larger files by path")
            file.write(chunk)
        file.flush()
        return await _add(run, Path(file.name), dataset_id, name, close, fields, key, share)


async def _small_body(request: Request) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_JSON_BYTES:
            raise HTTPException(413, "a JSON body here is a path; to upload a file, send it as application/octet-stream")
    return body


async def _add(
    run: Run,
    source: Path,
    dataset_id: str | None,
    name: str,
    close: bool,
    mapping: dict[str, str | None] | None,
    key: str | None,
    share: Change | None,
) -> Submitted:
    _going_on(run)
    digest = await submits.digest_in_thread(source) if key is not None else None
    found, added, created = await submits.add(
        run.core, source, dataset_id=dataset_id, name=name, mapping=mapping, key=key, digest=digest, share=share
    )
    if close:
        await run.core.feed.close(found)
        run.core.ring()
    dataset = next(d for d in run.core.feed.datasets() if d.dataset_id == found)
    return Submitted(dataset_id=found, rows_added=added, rows=dataset.rows, closed=dataset.closed, created=created)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    once: dict[str, Any] = {}
    for target, name in pairs:
        if target in once:
            raise DatasetError(f"mapping names {target!r} twice; leave one")
        once[target] = name
    return once


def _mapping(text: str | None) -> dict[str, str | None] | None:
    if text is None:
        return None
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except DatasetError:
        raise
    except (ValueError, RecursionError) as error:  # beside what is no JSON: numbers too long, lists too deep
        raise DatasetError(f'mapping is not JSON ({error}); write it like {{"prompt": "question"}}') from None
    if not isinstance(value, dict) or not all(isinstance(v, str | None) for v in value.values()):
        raise DatasetError('mapping must be an object of names, like {"prompt": "question", "answer": "label"}')
    return value
