"""An S3 store on this machine, behind a proxy that makes mistakes."""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from faulty_server import Proxy, running
from mispair.pairs import remote

BUCKET = "bucket"


class S3Store:
    """The store, seen without faults."""

    def __init__(self, proxy: Proxy, client: Any) -> None:
        self.proxy, self._client = proxy, client

    def upload(self, folder: Path, prefix: str) -> str:
        """Puts all files of a folder there; its URL."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                self._client.upload_file(str(path), BUCKET, f"{prefix}/{path.relative_to(folder).as_posix()}")
        return f"s3://{BUCKET}/{prefix}"

    def put(self, name: str, content: bytes) -> None:
        self._client.put_object(Bucket=BUCKET, Key=name, Body=content)

    def delete(self, name: str) -> None:
        self._client.delete_object(Bucket=BUCKET, Key=name)

    def read(self, name: str) -> bytes:
        found: bytes = self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        return found

    def files(self, prefix: str) -> dict[str, bytes]:
        """What is in a folder."""
        found = self._client.list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/").get("Contents", [])
        return {item["Key"].removeprefix(f"{prefix}/"): self.read(item["Key"]) for item in found}


@contextmanager
def s3_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Store]:
    """A store with one bucket, which the usual variables of the environment name."""
    boto3, server = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(remote, "PAUSE", 0.0)
    monkeypatch.setattr(remote, "TIMEOUT", 0.5)
    store = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    try:
        port = store.get_host_and_port()[1]
        # All servers of a process have the same content.
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")).close()
        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        client.create_bucket(Bucket=BUCKET)
        with running(Proxy(port)) as proxy:
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            s3fs.S3FileSystem.clear_instance_cache()
            yield S3Store(proxy, client)
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        store.stop()
